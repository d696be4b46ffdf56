"""What became of `context over cp`: how much is cut, how attention deals with it, and how even the work is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from compiler.context.balance import imbalance, seen_by_rank
from compiler.context.layouts import context_axes, context_methods
from compiler.ir.graph import Node
from compiler.layout.placement import Shard, shard_axes
from compiler.layout.rules.signature import arguments

if TYPE_CHECKING:
    from compiler.driver import Compilation


def method_at(node: Node, axis: str) -> str:
    """How an attention deals with an axis: "gather", "ring", "ulysses", or "" where its queries are not cut over it."""
    query, key = (value.layout[axis] if value.layout else None for value in node.args[:2])
    sequence = len(node.args[0].shape) - 2
    if not isinstance(query, Shard):
        return ""
    if query.dim == sequence:
        return "ring" if isinstance(key, Shard) and key.dim == sequence else "gather"
    return "ulysses" if query.dim == sequence - 1 else ""


def attentions(c: Compilation) -> list[Node]:
    return [node for node in c.assigned.main.nodes if node.op == "planc.attention"]


def counted(c: Compilation) -> dict[str, Counter[str]]:
    """For each context axis, how many attentions deal with it in which way."""
    nodes = attentions(c)
    return {axis: Counter(method_at(node, axis) for node in nodes) for axis in context_axes(c.plan)}


def unevenness(c: Compilation) -> float:
    """The most pairs of query and key that the queries of one rank see, over the mean of all: of the attention where it
    is largest. Where heads are divided, and not queries, it is 1."""
    found = [1.0]
    for node in attentions(c):
        given = arguments(node)
        query, key = given["query"], given["key"]
        places = [place for a in context_axes(c.plan) if isinstance(place := query.layout[a], Shard)]
        cut = [place for place in places if place.dim == len(query.shape) - 2]
        if cut and query.shape[-2] == key.shape[-2]:
            ways = math.prod(c.mesh.size(axis) for axis in shard_axes(query.layout, cut[0], c.mesh))
            found.append(imbalance(seen_by_rank(query.shape[-2], ways, cut[0].order, given["causal"], given["window"])))
    return max(found)


def sequences(c: Compilation) -> Iterator[str]:
    """The inputs that are cut along their sequence."""
    yield from (spec.name for spec in c.program.inputs if spec.cuts)


def asked_context(c: Compilation) -> Iterator[tuple[str, str, str]]:
    """(request, outcome, detail) of each part of the statement."""
    strategy = c.plan.context
    axes = context_axes(c.plan)
    if strategy is None or not axes:
        return
    sizes = " ".join(f"{axis}={c.plan.axis_size(axis)}" for axis in axes)
    inputs = list(sequences(c))
    what = f"{', '.join(inputs)} cut along the sequence" if inputs else "activations cut along the sequence"
    even = f", the most work of a rank {unevenness(c):.2f} times the mean" if attentions(c) else ""
    yield f"context over {', '.join(axes)}", "applied", f"{what}, {sizes}, {strategy.order}{even}"
    methods = context_methods(c.plan)
    for axis, found in counted(c).items():
        done, total = found[methods[axis]], sum(found.values())
        outcome = "applied" if done and done == total else "partly" if done else "refused"
        rest = [f"{count} {name or 'with whole sequences'}" for name, count in found.items() if name != methods[axis]]
        detail = f"{done} of {total} attentions" + (f" ({', '.join(rest)})" if rest else "")
        yield (
            f"attention = {strategy.attention}" + (f" ({methods[axis]} over {axis})" if len(axes) > 1 else ""),
            outcome,
            detail,
        )
