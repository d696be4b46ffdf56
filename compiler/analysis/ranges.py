"""Which integers an input may hold, from what the model does with them: the rows of an embedding, the classes of a
loss. Random batches for verification and synthetic training data are drawn from these ranges."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.graph import Graph, Node, Value

MOVES = ("aten.view.", "aten.permute.", "aten.slice.", "aten.select.", "aten.expand.", "aten.constant_pad_nd.",
         "planc.cast", "aten.detach.", "aten.masked_fill.", "aten.where.", "aten.cat.", "aten.index.", "aten.flip.")  # fmt: skip


@dataclass(frozen=True)
class Range:
    """Values in [0, below), or `ignore`. None: not known, or no such value."""

    below: int | None = None
    ignore: int | None = None


def input_range(graph: Graph, value: Value) -> Range:
    """The range of one integer input; an empty one for other dtypes."""
    if not value.dtype.startswith(("int", "uint")):
        return Range()
    users = graph.users()
    below: list[int] = []
    ignore: int | None = None
    queue, seen = [value], {value}
    while queue:
        current = queue.pop()
        for node in users.get(current, ()):
            limit, ignored = use_limit(node, current)
            if limit is not None:
                below.append(limit)
            ignore = ignored if ignored is not None else ignore
            if node.op.startswith(MOVES):
                for out in node.outputs:
                    if out is not None and out not in seen:
                        seen.add(out)
                        queue.append(out)
    return Range(min(below, default=None), ignore)


def use_limit(node: Node, value: Value) -> tuple[int | None, int | None]:
    """(exclusive upper bound, ignored value) that this use asks of `value`."""
    if node.op == "aten.embedding.default" and node.args[1] is value:
        return node.args[0].shape[0], None
    if node.op == "aten.cross_entropy_loss.default" and node.args[1] is value:
        logits = node.args[0]
        ignore = node.args[4] if len(node.args) > 4 else -100
        return logits.shape[1 if len(logits.shape) > 1 else 0], ignore
    if node.op in ("aten.gather.default", "aten.index_select.default") and node.args[2] is value:
        return node.args[0].shape[node.args[1]], None
    return None, None
