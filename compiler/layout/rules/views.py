"""Views and other movements of data: which part of the operand a part of the result is made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from compiler.ir.graph import Node, Value
from compiler.layout.rule import Dims, LocalShapes, Rule, einsum, rule, whole
from compiler.layout.rules.signature import arguments, linear_in, positions, with_arguments

FIRST = (frozenset({0}),)
"""Moving elements about is linear: partial sums may pass."""


def only(node: Node) -> Value:
    """The node's only result."""
    (out,) = node.outputs
    assert out is not None
    return out


# -- reshaping ---------------------------------------------------------------------------------------------------------


@dataclass
class _Split:
    """A dimension while it is taken apart: factors found at both ends, and the size of what is left between them."""

    rest: int
    outer: list[str] = field(default_factory=list)
    inner: list[str] = field(default_factory=list)


def common_factors(
    before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """The coarsest factors that both shapes of the same elements are products of: (before, after, sizes, fixed).

    Outermost first, the greatest common divisor of what is left of both shapes' dimensions is a factor of both. Where
    there is none (3 against 2), the same is done from the innermost end; what then is left in the middle has no
    common factors and must be whole.

    >>> common_factors((6, 4), (2, 12))[:2]
    ((('f0', 'f1'), ('f2',)), (('f0',), ('f1', 'f2')))
    """
    left, right = [_Split(size) for size in before], [_Split(size) for size in after]
    sizes: dict[str, int] = {}
    for inner in (False, True):
        step = -1 if inner else 1
        while True:
            ends = [next((dim for dim in side[::step] if dim.rest != 1), None) for side in (left, right)]
            if ends[0] is None or ends[1] is None:
                break
            size = math.gcd(ends[0].rest, ends[1].rest)
            if size <= 1:
                break
            name = f"f{len(sizes)}"
            sizes[name] = size
            for dim in ends:
                dim.rest //= size
                dim.inner.insert(0, name) if inner else dim.outer.append(name)
    fixed: list[str] = []
    sides: list[Dims] = []
    for side, prefix in ((left, "x"), (right, "y")):
        dims = []
        for k, dim in enumerate(side):
            middle = (f"{prefix}{k}",) if dim.rest != 1 else ()
            sizes.update(dict.fromkeys(middle, dim.rest))
            fixed += middle
            dims.append((*dim.outer, *middle, *dim.inner))
        sides.append(tuple(dims))
    return sides[0], sides[1], sizes, frozenset(fixed)


def local_view(node: Node, shapes: LocalShapes) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    return "aten.view.default", (node.args[0], shapes(only(node))), {}


@rule(
    "aten.view.default",
    "aten.reshape.default",
    "aten._unsafe_view.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.unsqueeze.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.view_as.default",
)
def view(node: Node) -> Rule:
    """Whatever it is called, its local form is the view of the local operand with the local shape."""
    before, after, sizes, fixed = common_factors(node.inputs[0].shape, only(node).shape)
    others = tuple(tuple(() for _ in value.shape) for value in node.inputs[1:])
    typed = frozenset(range(1, len(node.inputs)))
    return Rule(
        (before, *others),
        (after,),
        sizes,
        fixed=fixed,
        linear=FIRST,
        shape_only=typed,
        localize=local_view,
        cheap=True,
    )


@rule("aten.expand.default", "aten.broadcast_to.default")
def expand(node: Node) -> Rule:
    """Dimensions that the operand lacks, or has once, are the result's alone."""
    return einsum(node, "... -> ...", linear=FIRST, size_arg=1, cheap=True)


# -- the order of dimensions -------------------------------------------------------------------------------------------


def reordered(node: Node, order: Iterable[int]) -> Rule:
    names = [f"d{k}" for k in range(len(node.inputs[0].shape))]
    text = f"{' '.join(names)} -> {' '.join(names[k] for k in order)}"
    return einsum(node, text, linear=FIRST, cheap=True)


@rule("aten.permute.default")
def permute(node: Node) -> Rule:
    rank = len(node.inputs[0].shape)
    return reordered(node, [dim % rank for dim in node.args[1]])


@rule("aten.transpose.int", "aten.swapaxes.default", "aten.t.default", "aten.numpy_T.default", "aten.mT.default")
def transpose(node: Node) -> Rule:
    rank = len(node.inputs[0].shape)
    order = list(range(rank))
    if node.op == "aten.numpy_T.default":
        return reordered(node, order[::-1])
    one, other = node.args[1:3] if len(node.args) > 2 else (-2, -1)
    if rank >= 2:
        order[one], order[other] = order[other], order[one]
    return reordered(node, order)


@rule("aten.movedim.int", "aten.movedim.intlist")
def movedim(node: Node) -> Rule:
    rank = len(node.inputs[0].shape)
    sources, targets = ([d % rank for d in ([item] if isinstance(item, int) else item)] for item in node.args[1:3])
    stay = iter(k for k in range(rank) if k not in sources)
    return reordered(node, [sources[targets.index(k)] if k in targets else next(stay) for k in range(rank)])


# -- parts and wholes --------------------------------------------------------------------------------------------------


def along(node: Node, dims: int | Iterable[int] | None, **options: Any) -> Rule:
    """Operands and results agree in every dimension but `dims`, which must be whole."""
    rank = len(node.inputs[0].shape)
    special = positions(dims, rank)
    sizes: dict[str, int] = {}

    def named(value: Value, prefix: str) -> Dims:
        names = [f"{prefix}{k}" if k in special else f"d{k}" for k in range(rank)]
        sizes.update(zip(names, value.shape))
        return tuple((name,) for name in names)

    operands = tuple(named(value, f"x{i}_") for i, value in enumerate(node.inputs))
    results = tuple(None if out is None else named(out, f"y{i}_") for i, out in enumerate(node.outputs))
    fixed = frozenset(name for name in sizes if not name.startswith("d"))
    return Rule(operands, results, sizes, fixed=fixed, **options)


def joined(
    node: Node, dim: int, lengths: Sequence[int], operands: Sequence[str], results: Sequence[str], **options: Any
) -> Rule:
    """Dimension `dim` of operands and results is `c` or one of its parts `c0`, `c1`, … of these lengths, which are one
    behind the other. See `compiler/layout/joined.py`."""
    rank = len(node.inputs[0].shape)
    before, after = (" ".join(f"d{k}" for k in where) for where in (range(dim), range(dim + 1, rank)))
    text = " -> ".join(", ".join(f"{before} {name} {after}" for name in names) for names in (operands, results))
    parts = {f"c{k}": length for k, length in enumerate(lengths)}
    return einsum(node, text, {"c": sum(lengths), **parts}, joined={"c": tuple(parts)}, **options)


def scaled(value: Value, dim: int, local: tuple[int, ...], position: int) -> int:
    """Where a border between parts of a joined dimension is in the local one: all parts shrink alike."""
    return position * local[dim] // value.shape[dim] if value.shape[dim] else 0


@rule("aten.slice.Tensor")
def slice_(node: Node) -> Rule:
    """All, or one of up to three parts: what is before, the slice, what is behind."""
    value, given, out = node.inputs[0], arguments(node), only(node)
    dim = given["dim"] % len(value.shape)
    size, length = value.shape[dim], out.shape[dim]
    if length == size:
        return einsum(node, "... -> ...", linear=FIRST, cheap=True, localize=whole_slice)
    if given["step"] != 1 or not length:
        return along(node, dim, linear=FIRST, cheap=True)
    start = _start(given["start"], size)
    lengths = [part for part in (start, length, size - start - length) if part]
    mine = f"c{1 if start else 0}"
    return joined(node, dim, lengths, ["c"], [mine], linear=FIRST, cheap=True, localize=local_slice)


def _start(start: int | None, size: int) -> int:
    start = start or 0
    return min(max(start + size if start < 0 else start, 0), size)


def whole_slice(node: Node, shapes: LocalShapes) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    return "aten.alias.default", (node.args[0],), {}


def local_slice(node: Node, shapes: LocalShapes) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The same part of the local operand."""
    value, given = node.inputs[0], arguments(node)
    dim = given["dim"] % len(value.shape)
    start = scaled(value, dim, shapes(value), _start(given["start"], value.shape[dim]))
    return node.op, (node.args[0], dim, start, start + shapes(only(node))[dim]), {}


@rule("aten.split.Tensor", "aten.chunk.default", "aten.split_with_sizes.default", "aten.split.sizes")
def split(node: Node) -> Rule:
    dim, lengths = arguments(node)["dim"] % len(node.inputs[0].shape), split_lengths(node)
    if not all(lengths):
        return along(node, dim, linear=FIRST)
    parts = [f"c{k}" for k in range(len(lengths))]
    return joined(node, dim, lengths, ["c"], parts, linear=FIRST, cheap=True, localize=local_split)


def split_lengths(node: Node) -> list[int]:
    """The lengths of the parts."""
    given = arguments(node)
    size = node.inputs[0].shape[given["dim"]]
    each = given.get("split_sizes", given.get("split_size"))
    if each is None:
        each = max(math.ceil(size / given["chunks"]), 1)
    return [min(each, size - at) for at in range(0, size, each)] if isinstance(each, int) else list(each)


def local_split(node: Node, shapes: LocalShapes) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Into as many parts as globally."""
    value = node.inputs[0]
    dim = arguments(node)["dim"] % len(value.shape)
    lengths = [scaled(value, dim, shapes(value), length) for length in split_lengths(node)]
    return "aten.split_with_sizes.default", (node.args[0], lengths, dim), {}


@rule("aten.select.int")
def select(node: Node) -> Rule:
    return without(node, node.args[1], cheap=True)


@rule("aten.unbind.int")
def unbind(node: Node) -> Rule:
    return without(node, arguments(node)["dim"])


def without(node: Node, dim: int, **options: Any) -> Rule:
    """The results lack the operand's dimension `dim`, which must be whole."""
    names = [f"d{k}" for k in range(len(node.inputs[0].shape))]
    dim %= len(names)
    rest = " ".join(name for k, name in enumerate(names) if k != dim)
    text = f"{' '.join(names)} -> " + ", ".join([rest] * len(node.outputs))
    return einsum(node, text, linear=FIRST, fixed=frozenset({f"d{dim}"}), **options)


@rule("aten.cat.default")
def cat(node: Node) -> Rule:
    together = linear_in(node, ("tensors",))
    if len({len(value.shape) for value in node.inputs}) > 1:
        return whole(node)  # an old form: empty vectors among the tensors are left out
    dim = arguments(node)["dim"] % len(node.inputs[0].shape)
    lengths = [value.shape[dim] for value in node.inputs]
    if not all(lengths):
        return along(node, dim, linear=together)
    return joined(node, dim, lengths, [f"c{k}" for k in range(len(lengths))], ["c"], linear=together)


@rule("aten.stack.default")
def stack(node: Node) -> Rule:
    names = [f"d{k}" for k in range(len(node.inputs[0].shape))]
    dim = arguments(node)["dim"] % (len(names) + 1)
    text = ", ".join([" ".join(names)] * len(node.inputs)) + f" -> {' '.join((*names[:dim], 'c', *names[dim:]))}"
    return einsum(node, text, linear=linear_in(node, ("tensors",)), fixed=frozenset({"c"}))


@rule("aten.constant_pad_nd.default", "aten.pad.default")
def pad(node: Node) -> Rule:
    given = arguments(node)
    amounts, rank = given["pad"], len(node.inputs[0].shape)
    padded = [rank - 1 - k // 2 for k, amount in enumerate(amounts) if amount]
    linear = FIRST if given.get("mode", "constant") != "constant" or not given["value"] else ()
    return along(node, padded, linear=linear) if padded else einsum(node, "... -> ...", linear=FIRST)


@rule("aten.flip.default")
def flip(node: Node) -> Rule:
    return along(node, node.args[1], linear=FIRST)


@rule("aten.roll.default")
def roll(node: Node) -> Rule:
    """Without dimensions it rolls the flattened tensor, over all of them."""
    return along(node, arguments(node)["dims"], linear=FIRST)


@rule("aten.tril.default", "aten.triu.default")
def triangle(node: Node) -> Rule:
    return along(node, (-2, -1), linear=FIRST)


@rule("aten.unfold.default")
def unfold(node: Node) -> Rule:
    names = [f"d{k}" for k in range(len(node.inputs[0].shape))]
    dim = node.args[1] % len(names)
    windows = [*names]
    windows[dim] = "windows"
    text = f"{' '.join(names)} -> {' '.join(windows)} width"
    return einsum(node, text, linear=FIRST, fixed=frozenset({names[dim], "windows", "width"}))


# -- repetition --------------------------------------------------------------------------------------------------------


@rule("aten.repeat.default", "aten.tile.default")
def repeat(node: Node) -> Rule:
    """A repeated dimension holds the operand's as its inner factor."""
    rank = len(only(node).shape)
    times = (1,) * (rank - len(node.args[1])) + tuple(node.args[1])
    dims = [f"(r{k} d{k})" for k in range(rank)]
    inner = [f"d{k}" for k in range(rank - len(node.inputs[0].shape), rank)]
    sizes = {f"r{k}": count for k, count in enumerate(times)}
    sizes |= {f"d{k}": 1 for k in range(rank - len(inner))}
    text = f"{' '.join(inner)} -> {' '.join(dims)}"
    return einsum(node, text, sizes, linear=FIRST, fixed=frozenset(f"r{k}" for k in range(rank)))


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(node: Node) -> Rule:
    """Each element becomes a block: the operand's dimension is the outer factor. The block may be cut, too."""
    dim = arguments(node)["dim"]
    if dim is None:
        return along(node, None, linear=FIRST) if len(node.inputs[0].shape) == 1 else whole(node)
    rank = len(node.inputs[0].shape)
    names = [f"d{k}" for k in range(rank)]
    blocked = [f"(d{k} r)" if k == dim % rank else f"d{k}" for k in range(rank)]
    text = f"{' '.join(names)} -> {' '.join(blocked)}"
    return einsum(node, text, {"r": node.args[1]}, linear=FIRST, localize=local_repeats, cheap=True)


def local_repeats(node: Node, shapes: LocalShapes) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """As often as the local block is long."""
    given = arguments(node)
    dim = given["dim"] % len(node.inputs[0].shape)
    before = shapes(node.inputs[0])[dim]
    repeats = shapes(only(node))[dim] // before if before else 1
    return with_arguments(node, repeats=repeats, output_size=None)
