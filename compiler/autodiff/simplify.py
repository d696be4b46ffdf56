"""Simplification of recorded local code: what autograd's formulas say twice is said once.

    t(t(x)) → x        view(x, its own shape) → x        expand(x, its own shape) → x
    the same operator on the same operands → one node (operators here have no side effects)
"""

from __future__ import annotations

from typing import Any

from compiler.ir.graph import Node, Value, map_values

RESHAPES = {"aten.view.default", "aten._unsafe_view.default", "aten.expand.default", "aten.reshape.default"}
NOT_PURE = {"planc.opaque", "planc.opaque_backward"}


def simplify(nodes: list[Node], known: dict[Value, Value] | None = None) -> tuple[list[Node], dict[Value, Value]]:
    """The shorter list, and for every value that went the one that stands for it. `known` are replacements to begin
    with. Nodes are changed in place."""
    env: dict[Value, Value] = dict(known or {})
    seen: dict[Any, Node] = {}
    kept: list[Node] = []
    for node in nodes:
        node.args, node.kwargs = map_values((node.args, node.kwargs), lambda v: env.get(v, v))
        out = node.outputs[0]
        same = _unchanged(node)
        if same is not None and out is not None:
            env[out] = same
            continue
        identity = _identity(node)
        twin = seen.get(identity) if node.op not in NOT_PURE else None
        if twin is not None:
            for mine, theirs in zip(node.outputs, twin.outputs):
                if mine is not None and theirs is not None:
                    env[mine] = theirs
            if all(theirs is not None for mine, theirs in zip(node.outputs, twin.outputs) if mine is not None):
                continue
        seen[identity] = node
        kept.append(node)
    return kept, env


def _unchanged(node: Node) -> Value | None:
    """The operand that a node merely hands on, if it does."""
    if node.op == "aten.t.default":
        inner = node.args[0].producer
        return inner.args[0] if inner is not None and inner.op == "aten.t.default" else None
    if node.op in RESHAPES and node.outputs[0] is not None:
        operand = node.args[0]
        return operand if operand.shape == node.outputs[0].shape else None
    return None


def _identity(node: Node) -> Any:
    """Equal for nodes that compute the same. 1, 1.0 and True are different arguments."""

    def marked(item: Any) -> Any:
        if isinstance(item, Value):
            return id(item)
        if isinstance(item, (tuple, list)):
            return tuple(marked(part) for part in item)
        if isinstance(item, dict):
            return tuple((key, marked(part)) for key, part in item.items())
        return type(item).__name__, repr(item)

    return node.op, marked(node.args), marked(node.kwargs)
