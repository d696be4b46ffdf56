"""lower_index: an index that only counts along a dimension leaves that dimension free to be cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from compiler.ir.graph import Graph, Node, Value
from compiler.layout.rules.signature import arguments
from compiler.passes.lower_support import Emitter, replace_calls


@dataclass(frozen=True)
class LowerIndex:
    """`x[arange(batch), last]` reads one entry of each sample: a `gather` along the other dimension alone.

    As an index, the counting would need every sample on every rank. Where all indices count, nothing is read at all:
    what is left is a view. Calls with more than one index that does not count stay.

    before:  %rows : int64[8] = aten.arange.start_step(0, 8, 1)
             %y : float32[8, 32] = aten.index.Tensor(%x, [%rows, %last])      # %x : float32[8, 64, 32]
    after:   %y.remainder : int64[8] = aten.remainder.Scalar(%last, 64)
             %y.view : int64[8, 1] = aten.view.default(%y.remainder, [8, 1])
             %y.view1 : int64[8, 1, 1] = aten.view.default(%y.view, [8, 1, 1])
             %y.expand : int64[8, 1, 32] = aten.expand.default(%y.view1, [8, 1, 32])
             %y.gather : float32[8, 1, 32] = aten.gather.default(%x, 1, %y.expand)
             %y : float32[8, 32] = aten.view.default(%y.gather, [8, 32])
    """

    name: str = "lower_index"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"indices_lowered"})

    def __call__(self, graph: Graph) -> Graph:
        graph = replace_calls(graph, _lower)
        graph.remove_dead()  # the counting
        return graph


@dataclass
class _Selection:
    """An `aten.index`: which dimension of self each dimension of the indices counts along, and what else is read.

    `points` are the sizes of the dimensions that the indices broadcast to; `counted[p]` is the dimension of self that
    dimension p of these counts along; `read` is the one dimension that is indexed otherwise, by `index`.
    """

    points: tuple[int, ...]
    counted: dict[int, int]
    read: int | None
    index: Value | None
    rest: list[int]
    front: int
    """How many of the dimensions that are not indexed stand before the points in the result."""


def _lower(node: Node, emit: Emitter) -> Sequence[Value] | None:
    if node.op != "aten.index.Tensor":
        return None
    found = _selection(node)
    if found is None:
        return None
    value = arguments(node)["self"]
    mapped = sorted(found.counted)
    free = [p for p in range(len(found.points)) if p not in found.counted]
    kept = tuple(value.shape[dim] for dim in found.rest)
    counts = tuple(found.points[p] for p in mapped)
    reading = (found.read,) if found.read is not None else ()
    value = _permuted(emit, value, [*(found.counted[p] for p in mapped), *reading, *found.rest])
    if found.index is not None:
        index = _positions(emit, found.index, found.points, mapped, free, value.shape[len(mapped)])
        width = math.prod(found.points[p] for p in free)
        index = emit("aten.view.default", index, (*index.shape, *[1] * len(kept)))
        index = _expanded(emit, index, (*counts, width, *kept))
        value = emit("aten.gather.default", value, len(mapped), index)
    else:
        value = _viewed(emit, value, (*counts, *[1] * len(free), *kept))
        value = _expanded(emit, value, (*counts, *(found.points[p] for p in free), *kept))
    value = _viewed(emit, value, (*counts, *(found.points[p] for p in free), *kept))
    # Now the dimensions are mapped, free, rest: bring them into the order of the result.
    order = [*mapped, *free]
    points = [order.index(p) for p in range(len(order))]
    rest = [len(order) + k for k in range(len(kept))]
    value = _permuted(emit, value, [*rest[: found.front], *points, *rest[found.front :]])
    return [value]


def _selection(node: Node) -> _Selection | None:
    given = arguments(node)
    value, indices = given["self"], given["indices"]
    indexed = [k for k, item in enumerate(indices) if isinstance(item, Value)]
    if any(indices[k].dtype in ("bool", "uint8") for k in indexed) or not indexed:
        return None
    rank = max(len(indices[k].shape) for k in indexed)
    sizes = [1] * rank
    for k in indexed:
        for p, size in enumerate(indices[k].shape, start=rank - len(indices[k].shape)):
            sizes[p] = max(sizes[p], size)
    counted: dict[int, int] = {}
    others: list[int] = []
    for k in indexed:
        p = counts_along(indices[k], value.shape[k])
        at = None if p is None else p + rank - len(indices[k].shape)
        if at is None or at in counted:
            others.append(k)
        else:
            counted[at] = k
    if not counted or len(others) > 1:
        return None
    rest = [dim for dim in range(len(value.shape)) if dim not in indexed]
    together = indexed == list(range(indexed[0], indexed[-1] + 1))
    front = indexed[0] if together else 0
    read = others[0] if others else None
    return _Selection(tuple(sizes), counted, read, None if read is None else indices[read], rest, front)


def counts_along(value: Value, size: int) -> int | None:
    """The dimension along which `value` counts 0, 1, … size - 1, being the same along all others."""
    node = value.producer
    if node is None or size == 1:
        return None
    if node.op in ("aten.arange.default", "aten.arange.start", "aten.arange.start_step"):
        given = arguments(node)
        begins = given.get("start", 0) == 0 and given.get("step", 1) == 1
        return 0 if begins and value.shape == (size,) else None
    if node.op not in ("aten.view.default", "aten.expand.default", "aten.permute.default", "planc.cast"):
        return None
    source = node.args[0]
    dim = counts_along(source, size)
    if dim is None or node.op == "planc.cast":
        return dim
    if node.op == "aten.permute.default":
        return [k % len(source.shape) for k in node.args[1]].index(dim)
    if node.op == "aten.expand.default":
        return dim + len(value.shape) - len(source.shape)
    # A view keeps counting along one dimension if that is all there is.
    whole = math.prod(source.shape) == size and value.shape.count(size) == 1 and math.prod(value.shape) == size
    return value.shape.index(size) if whole else None


def _positions(
    emit: Emitter, index: Value, points: tuple[int, ...], mapped: list[int], free: list[int], size: int
) -> Value:
    """The index as [mapped…, free together], counted from the front of a dimension of this size."""
    index = emit.cast(emit("aten.remainder.Scalar", index, size), "int64")
    index = _viewed(emit, index, (*[1] * (len(points) - len(index.shape)), *index.shape))
    index = _permuted(emit, _expanded(emit, index, points), [*mapped, *free])
    return _viewed(emit, index, (*(points[p] for p in mapped), math.prod(points[p] for p in free)))


def _permuted(emit: Emitter, value: Value, order: list[int]) -> Value:
    return value if order == sorted(order) else emit("aten.permute.default", value, tuple(order))


def _expanded(emit: Emitter, value: Value, shape: tuple[int, ...]) -> Value:
    return value if value.shape == shape else emit("aten.expand.default", value, shape)


def _viewed(emit: Emitter, value: Value, shape: tuple[int, ...]) -> Value:
    return value if value.shape == shape else emit("aten.view.default", value, shape)
