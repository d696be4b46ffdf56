"""Reading and writing at given positions. Positions count in the whole dimension, so an indexed one must be whole;
the positions themselves, and all other dimensions, may be cut."""

from __future__ import annotations

from dataclasses import replace

from compiler.ir.graph import Node, Value
from compiler.layout.rule import Rule, einsum, rule, whole
from compiler.layout.rules.signature import arguments, by_name, linear_in
from compiler.layout.rules.views import FIRST, along


@rule("aten.embedding.default")
def embedding(node: Node) -> Rule:
    """Of a table cut by rows each rank looks up what it has: its result is a term, zero for the tokens of others."""
    return by_name(node, {"weight": "v d", "indices": "..."}, "... d", linear=("weight",), picked=frozenset({"v"}))


@rule("aten.one_hot.default")
def one_hot(node: Node) -> Rule:
    return einsum(node, "... -> ... n", fixed=frozenset({"n"}))


@rule("aten.index_select.default")
def index_select(node: Node) -> Rule:
    value, dim, index = node.args
    if not value.shape:
        return whole(node)
    names = [f"d{k}" for k in range(len(value.shape))]
    result = [*names]
    result[dim % len(names)] = "i" if index.shape else "1"
    text = f"{' '.join(names)}, {'i' if index.shape else ''} -> {' '.join(result)}"
    return einsum(node, text, linear=FIRST, fixed=frozenset({f"d{dim % len(names)}"}))


# -- along one dimension -----------------------------------------------------------------------------------------------


def aligned(node: Node, linear: tuple[str, ...]) -> Rule:
    """`self` and `index` (and `src`) correspond position by position, except along `dim`.

    Where `index` is shorter than `self` it covers just the beginning: that dimension must be whole as well.
    """
    given = arguments(node)
    rank = max(len(value.shape) for value in node.inputs)
    if any(len(value.shape) != rank for value in node.inputs) or not rank:
        return whole(node)
    sizes = {value.shape for value in node.inputs} | {out.shape for out in node.outputs if out is not None}
    differing = [k for k in range(rank) if len({shape[k] for shape in sizes}) > 1]
    return along(node, {given["dim"] % rank, *differing}, linear=linear_in(node, linear))


@rule("aten.gather.default", "aten.take_along_dim.default")
def gather(node: Node) -> Rule:
    """Which positions along `dim` are read may be cut. If `self` is cut there, each rank reads what it has: a term."""
    if arguments(node)["dim"] is None:
        return whole(node)
    found = aligned(node, ("self",))
    dim = arguments(node)["dim"] % max(len(found.operands[0]), 1)
    if found.fallback:
        return found
    read = (*found.results[0][:dim], found.operands[1][dim], *found.results[0][dim + 1 :])
    free = {*found.operands[1][dim]}
    picked = frozenset(found.operands[0][dim]) if node.op == "aten.gather.default" else frozenset()
    return replace(found, results=(read,), fixed=found.fixed - free - picked, picked=picked)


@rule("aten.scatter.src", "aten.scatter_add.default")
def scatter(node: Node) -> Rule:
    return aligned(node, ("self src",))


@rule("aten.scatter.value", "aten.scatter_reduce.two", "aten.scatter.reduce", "aten.scatter.value_reduce")
def scatter_value(node: Node) -> Rule:
    return aligned(node, ("self",) if arguments(node).get("value") == 0 else ())


@rule("aten.slice_scatter.default")
def slice_scatter(node: Node) -> Rule:
    return aligned(node, ("self src",))


@rule("aten.select_scatter.default")
def select_scatter(node: Node) -> Rule:
    given, names = arguments(node), [f"d{k}" for k in range(len(node.inputs[0].shape))]
    dim = given["dim"] % len(names)
    rest = " ".join(name for k, name in enumerate(names) if k != dim)
    every = " ".join(names)
    return einsum(node, f"{every}, {rest} -> {every}", linear=(frozenset({0, 1}),), fixed=frozenset({f"d{dim}"}))


@rule("aten.index_add.default", "aten.index_copy.default")
def index_add(node: Node) -> Rule:
    value, dim, index, source = node.args[:4]
    if len(source.shape) != len(value.shape) or not value.shape:
        return whole(node)
    names = [f"d{k}" for k in range(len(value.shape))]
    dim %= len(names)
    written = " ".join("i" if k == dim else name for k, name in enumerate(names))
    every, fixed = " ".join(names), frozenset({f"d{dim}", "i"})
    return einsum(node, f"{every}, i, {written} -> {every}", linear=(frozenset({0, 2}),), fixed=fixed)


@rule("aten.index_fill.int_Scalar")
def index_fill(node: Node) -> Rule:
    value, dim = node.args[:2]
    names = [f"d{k}" for k in range(len(value.shape))]
    every, fixed = " ".join(names), frozenset({f"d{dim % len(names)}", "i"})
    return einsum(node, f"{every}, i -> {every}", linear=FIRST if node.args[3] == 0 else (), fixed=fixed)


# -- at several dimensions at once -------------------------------------------------------------------------------------


def advanced(node: Node) -> tuple[str, str, dict[str, str], frozenset[str]] | None:
    """Of `self[indices]`: the dimensions of self, those of the selection, of each index, and what must be whole.

    The indices broadcast together; their dimensions stand where the indexed ones stood, or in front if those were
    not side by side. An index of booleans selects an unknown number of elements: no rule (None).
    """
    given = arguments(node)
    value, indices = given["self"], given["indices"]
    if any(isinstance(item, Value) and item.dtype in ("bool", "uint8") for item in indices):
        return None
    indexed = [k for k, item in enumerate(indices) if isinstance(item, Value)]
    if not indexed:
        return None
    rank = max(len(indices[k].shape) for k in indexed)
    points = [f"i{k}" for k in range(rank)]
    names = [f"d{k}" for k in range(len(value.shape))]
    rest = [name for k, name in enumerate(names) if k not in indexed]
    together = indexed == list(range(indexed[0], indexed[-1] + 1))
    at = indexed[0] if together else 0
    selection = [*rest[:at], *points, *rest[at:]]
    texts = {k: " ".join(points[rank - len(indices[k].shape) :]) for k in indexed}
    fixed = frozenset(names[k] for k in indexed)
    return " ".join(names), " ".join(selection), texts, fixed


@rule("aten.index.Tensor")
def index(node: Node) -> Rule:
    found = advanced(node)
    if found is None:
        return whole(node)
    dims, selection, texts, fixed = found
    return einsum(node, f"{', '.join([dims, *texts.values()])} -> {selection}", linear=FIRST, fixed=fixed)


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(node: Node) -> Rule:
    """The points, too, must be whole: what each rank writes, all must see."""
    found = advanced(node)
    if found is None:
        return whole(node)
    dims, selection, texts, fixed = found
    points = {name for text in texts.values() for name in text.split()}
    values = arguments(node)["values"]
    names = selection.split()
    written = " ".join(names[len(names) - len(values.shape) :])
    text = f"{', '.join([dims, *texts.values(), written])} -> {dims}"
    return einsum(node, text, linear=linear_in(node, ("self values",)), fixed=fixed | points)
