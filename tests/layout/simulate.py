"""A reference for what layouts mean: all ranks of a mesh in lockstep, a list of local tensors for each value.

Everything here is written down from the definitions (the placements' table, the redistributions' table), with no
regard to speed and with nothing of the runtime. Padding is filled with entries from elsewhere: finite garbage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiler.autodiff.local import localized, shape_of
from compiler.ir.graph import Graph, Node, Value, map_values
from compiler.layout.placement import Layout, Mesh, Partial, Replicate, Shard, Varying, shard_axes, transpose
from compiler.layout.redistribute import held_cut
from compiler.layout.rule import rule_of
from compiler.layout.rules.signature import arguments

Parts = list[Tensor]
REDUCE = {
    "sum": lambda parts: sum(parts[1:], parts[0]),
    "avg": lambda parts: sum(parts[1:], parts[0]) / len(parts),
    "max": lambda parts: torch.stack(parts).amax(0),
    "min": lambda parts: torch.stack(parts).amin(0),
}


# -- what a layout says ------------------------------------------------------------------------------------------------


def coordinates(mesh: Mesh) -> list[dict[str, int]]:
    """Each rank's coordinates; the last axis varies fastest."""
    return [dict(zip(mesh.names, point)) for point in itertools.product(*(range(size) for _, size in mesh.axes))]


def chunks(index: int, ways: int, order: str) -> list[int]:
    """The chunks that rank `index` of `ways` holds."""
    if not order or ways == 1:
        return [index]
    if order == "zigzag":
        return [index, 2 * ways - 1 - index]
    found, before = [], 0
    for length in map(int, order.split("+")):  # a piece is so many chunks for each rank
        found += range(before + index * length, before + (index + 1) * length)
        before += ways * length
    return found


def held(shape: Sequence[int], layout: Layout, mesh: Mesh, at: Mapping[str, int]) -> list[Tensor]:
    """For each dimension, the global positions that the rank at these coordinates holds; -1 is padding."""
    found = []
    for dim, size in enumerate(shape):
        where = torch.arange(size)
        cuts = {place for place in layout.values() if isinstance(place, Shard) and place.dim == dim}
        for cut in sorted(cuts, key=lambda cut: -cut.outer):  # inner factors first: the outer ones are still whole
            axes = shard_axes(layout, cut, mesh)
            ways, index = 1, 0
            for axis in axes:
                ways, index = ways * mesh.size(axis), index * mesh.size(axis) + at[axis]
            count = size // (cut.outer * cut.unit)
            mine = chunks(index, ways, cut.order)
            total = ways * len(mine)
            if count % total == 0:  # then the unit is folded into the count, of which inner cuts may have taken a part
                where = where.view(cut.outer, total, -1)[:, mine].reshape(-1)
                continue
            length = math.ceil(count / total)
            split = where.view(cut.outer, count, -1)
            padded = torch.cat([split, split.new_full((cut.outer, length * total - count, split.shape[2]), -1)], 1)
            where = padded.unflatten(1, (total, length))[:, mine].reshape(-1)
        found.append(where)
    return found


def taken(tensor: Tensor, where: Sequence[Tensor]) -> Tensor:
    """The entries at these positions of each dimension; in padding, some others (the same of every term of a sum)."""
    for dim, index in enumerate(where):
        junk = (torch.arange(len(index)) * 31 + 7) % max(tensor.shape[dim], 1)
        tensor = tensor.index_select(dim, torch.where(index < 0, junk, index))
    return tensor


def without_padding(tensor: Tensor, where: Sequence[Tensor]) -> Tensor:
    """Zero in the padding."""
    for dim, index in enumerate(where):
        real = (index >= 0).view([-1 if k == dim else 1 for k in range(tensor.dim())])
        tensor = torch.where(real, tensor, torch.zeros_like(tensor))
    return tensor


def distribute(tensor: Tensor, layout: Layout, mesh: Mesh, gradient: bool = False) -> Parts:
    """The local tensors of a value. A gradient has nothing in its padding."""
    parts = []
    partial = [axis for axis in mesh.names if isinstance(layout[axis], Partial)]
    terms = {point: tensor for point in itertools.product(*(range(mesh.size(axis)) for axis in partial))}
    if partial:
        for point in terms:
            terms[point] = torch.randn(tensor.shape, dtype=tensor.dtype)
        first, *rest = terms
        terms[first] = tensor - sum((terms[point] for point in rest), torch.zeros_like(tensor))
    for at in coordinates(mesh):
        where = held(tensor.shape, layout, mesh, at)
        part = taken(terms[tuple(at[axis] for axis in partial)], where)
        parts.append(without_padding(part, where) if gradient else part.clone())
    return parts


def assemble(parts: Parts, shape: Sequence[int], layout: Layout, mesh: Mesh, gradient: bool = False) -> Tensor:
    """The global tensor; asserts that replicas agree and, of a gradient, that its padding is empty."""
    ranks = coordinates(mesh)
    found = dict(zip((tuple(at.values()) for at in ranks), parts))
    whole = torch.zeros(tuple(shape), dtype=parts[0].dtype)
    for point, part in found.items():
        where = held(shape, layout, mesh, dict(zip(mesh.names, point)))
        local = tuple(len(index) for index in where)
        assert part.shape == local, f"a part of {tuple(shape)} {layout} is {tuple(part.shape)}, not {local}"
        if gradient:
            empty = without_padding(part, where).nan_to_num() == part.nan_to_num()
            assert empty.all(), f"the gradient's padding is not empty: {layout}"
        found[point] = without_padding(part, where)
    for k, axis in enumerate(mesh.names):
        place, groups = layout[axis], {}
        for point, part in found.items():
            alike = point if isinstance(place, Shard) else (*point[:k], 0, *point[k + 1 :])
            groups.setdefault(alike, []).append(part)
        if isinstance(place, (Replicate, Varying)):
            for group in groups.values():
                for part in group[1:]:
                    torch.testing.assert_close(
                        part, group[0], equal_nan=True, msg=lambda text: f"replicas differ over {axis}: {text}"
                    )
        combine = REDUCE[place.op] if isinstance(place, Partial) else lambda group: group[0]
        found = {point: combine(group) for point, group in groups.items()}
    for point, part in found.items():
        where = held(shape, layout, mesh, dict(zip(mesh.names, point)))
        real = [index[index >= 0] for index in where]
        inside = part
        for dim, index in enumerate(where):
            inside = inside.index_select(dim, (index >= 0).nonzero().flatten())
        if shape:
            whole[torch.meshgrid(*real, indexing="ij")] = inside
        else:
            whole = inside
    return whole


def dual(layout: Layout, mesh: Mesh) -> Layout:
    """The layout of a value's gradient."""
    return Layout((axis, transpose(layout[axis])) for axis in mesh.names)


# -- redistributions ---------------------------------------------------------------------------------------------------


class Exchange(torch.autograd.Function):
    """`function` from the ranks' tensors to the ranks' tensors, with `back` from gradients to gradients."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Parts], Parts], back: Callable[[Parts], Parts], *parts: Tensor):
        ctx.back = back
        results = tuple(result.clone() for result in function(list(parts)))
        if not results[0].is_floating_point():
            ctx.mark_non_differentiable(*results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        return (None, None, *ctx.back(list(gradients)))


class Collectives:
    """The redistributions on lists, with the arguments that their nodes have.

    The padding of a value is entries from elsewhere, so that whatever is computed of it is as finite as of these; the
    padding of a gradient (`zero`) must be empty, for it is summed up in the gradients of what is used whole.
    """

    def __init__(self, mesh: Mesh):
        self.mesh, self.ranks = mesh, coordinates(mesh)

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """The ranks that differ on `axes` alone, in order."""
        found: dict[tuple, list[int]] = {}
        for rank, at in enumerate(self.ranks):
            found.setdefault(tuple(c for axis, c in at.items() if axis not in axes), []).append(rank)
        return list(found.values())

    def each(self, parts: Parts, axes: Sequence[str], function: Callable[[Parts], Parts]) -> Parts:
        """`function` within each group."""
        results: dict[int, Tensor] = {}
        for group in self.groups(axes):
            results |= dict(zip(group, function([parts[rank] for rank in group])))
        return [results[rank] for rank in range(len(parts))]

    def all_reduce(self, parts: Parts, axes: Sequence[str], op: str) -> Parts:
        return self.each(parts, axes, lambda group: [REDUCE[op](group)] * len(group))

    def all_gather(
        self, parts: Parts, axes: Sequence[str], dim: int, outer: int, count: int, unit: int, order: str = ""
    ) -> Parts:
        def joined(group: Parts) -> Parts:
            where = self.places(len(group), count, order)
            split = torch.cat([part.unflatten(dim, (outer, len(where[0]), unit)) for part in group], dim + 1)
            back = torch.cat(where).argsort()[-count:] if count else torch.zeros(0, dtype=torch.long)
            return [split.index_select(dim + 1, back).flatten(dim, dim + 2)] * len(group)

        return self.each(parts, axes, joined)

    @staticmethod
    def places(ways: int, count: int, order: str) -> list[Tensor]:
        """The positions that each of `ways` ranks holds; -1 is padding."""
        numbers = [chunks(k, ways, order) for k in range(ways)]
        total = ways * len(numbers[0])
        length = math.ceil(count / total)
        where = torch.cat([torch.arange(count), torch.full((length * total - count,), -1)]).view(total, length)
        return [where[mine].reshape(-1) for mine in numbers]

    def pieces(
        self, whole: Tensor, ways: int, dim: int, outer: int, count: int, unit: int, order: str, zero: bool
    ) -> Parts:
        """What each of `ways` ranks holds of `whole`; the padding is zero, or whatever."""
        split = whole.unflatten(dim, (outer, count, unit))
        every = [torch.arange(size) for size in split.shape]
        found = []
        for where in self.places(ways, count, order):
            every[dim + 1] = where
            part = taken(split, every)
            found.append((without_padding(part, every) if zero else part).flatten(dim, dim + 2))
        return found

    def shard(self, parts: Parts, axes: Sequence[str], *cut: Any, zero: bool = False) -> Parts:
        cut = cut if len(cut) == 5 else (*cut, "")

        def piece(group: Parts) -> Parts:
            return [self.pieces(part, len(group), *cut, zero)[k] for k, part in enumerate(group)]

        return self.each(parts, axes, piece)

    def unshard(self, parts: Parts, axes: Sequence[str], *cut: Any) -> Parts:
        def placed(group: Parts) -> Parts:
            everyone = Collectives(Mesh((("all", len(group)),)))
            alone = [[torch.zeros_like(part) for part in group] for _ in group]
            for k, part in enumerate(group):
                alone[k][k] = part
            return [everyone.all_gather(parts, ("all",), *cut)[0] for parts in alone]

        return self.each(parts, axes, placed)

    def reduce_scatter(self, parts: Parts, axes: Sequence[str], *cut: Any, zero: bool = False) -> Parts:
        cut = cut if len(cut) == 5 else (*cut, "")
        return self.each(parts, axes, lambda group: self.pieces(REDUCE["sum"](group), len(group), *cut, zero))

    def first(self, parts: Parts, axis: str) -> Parts:
        return self.each(parts, (axis,), lambda group: [group[0], *(torch.zeros_like(part) for part in group[1:])])

    def all_to_all(self, parts: Parts, axis: str, before: tuple, after: tuple, zero: bool = False) -> Parts:
        return self.shard(self.all_gather(parts, (axis,), *before), (axis,), *after, zero=zero)

    def mask(
        self, parts: Parts, axes: Sequence[str], dim: int, outer: int, count: int, unit: int, order: str, limit: int, op: str
    ) -> Parts:
        def filled(group: Parts) -> Parts:
            results = []
            for part, where in zip(group, self.places(len(group), count, order)):
                split = part.unflatten(dim, (outer, len(where), unit)).clone()
                empty = (where < 0) | (where >= limit)
                split[(slice(None),) * (dim + 1) + (empty,)] = neutral(op, part.dtype)
                results.append(split.flatten(dim, dim + 2))
            return results

        return self.each(parts, axes, filled)

    def run(self, node: Node, parts: Parts) -> Parts:
        """A redistribution node, differentiable as the placements before and after say."""
        name, args, (out,) = node.op.removeprefix("planc."), node.args[1:], node.outputs
        before, after = node.args[0].layout, out.layout
        if name in ("all_gather", "reduce_scatter", "shard", "mask"):  # their cut is in the order that the layout says
            places = [layout[args[0][0]] for layout in (before, after)]
            order = next(place.order for place in places if isinstance(place, Shard))
            args = (*args[:5], order, *args[5:])

        def same(gradients: Parts) -> Parts:
            return gradients

        def moved(function: Callable[..., Parts], *rest: Any, **options: Any) -> Callable[[Parts], Parts]:
            return lambda tensors: function(tensors, *rest, **options)

        if name == "alias":
            pair = (same, same)
        elif name == "vary":
            pair = (same, moved(self.all_reduce, *args, "sum"))
        elif name == "all_reduce":
            pair = (moved(self.all_reduce, *args), same)
        elif name == "all_gather":
            whole = isinstance(after[args[0][0]], Replicate)
            pair = moved(self.all_gather, *args), moved(self.shard if whole else self.reduce_scatter, *args, zero=True)
        elif name == "reduce_scatter":
            pair = (moved(self.reduce_scatter, *args), moved(self.all_gather, *args))
        elif name == "shard":
            whole = isinstance(before[args[0][0]], Replicate)
            pair = (moved(self.shard, *args), moved(self.all_gather if whole else self.unshard, *args))
        elif name == "first":
            pair = (moved(self.first, *args), moved(self.first, *args))
        elif name == "all_to_all":
            axis = args[0]
            cuts = [
                (*held_cut(value, value.layout[axis], (axis,), self.mesh), value.layout[axis].order)
                for value in (node.args[0], out)
            ]
            back = moved(self.all_to_all, axis, *cuts[::-1], zero=True)
            pair = (moved(self.all_to_all, axis, *cuts), back)
        elif name == "mask":
            pair = (moved(self.mask, *args), moved(self.mask, *args[:7], "sum"))
        else:
            raise KeyError(node.op)
        return list(Exchange.apply(*pair, *parts))


REDISTRIBUTIONS = {
    f"planc.{name}"
    for name in "alias vary all_reduce all_gather reduce_scatter shard first all_to_all mask".split()
}


def neutral(op: str, dtype: torch.dtype) -> float | int | bool:
    if op == "sum":
        return 0
    sign = -1 if op == "max" else 1
    if dtype == torch.bool:
        return sign > 0
    if dtype.is_floating_point:
        return sign * math.inf
    return torch.iinfo(dtype).min if sign < 0 else torch.iinfo(dtype).max


# -- computation -------------------------------------------------------------------------------------------------------


def evaluate(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor | None]:
    """An operator on tensors; planc's own are written out."""

    def plain(argument: Any) -> Any:
        if isinstance(argument, str) and argument.startswith("torch."):
            return getattr(torch, argument.removeprefix("torch."))
        return [plain(item) for item in argument] if isinstance(argument, tuple) else argument

    if op.startswith("planc."):
        return [OWN[op](*args, **kwargs)]
    namespace, packet, overload = op.split(".")
    name = "reshape" if packet == "view" and overload == "default" else packet
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    found = function(*map(plain, args), **{key: plain(item) for key, item in kwargs.items()})
    return list(found) if isinstance(found, (tuple, list)) else [found]


def _attention(query, key, value, mask, causal, scale, p, site, rows=None):
    groups = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-2, -1) * scale
    if causal:
        rows = torch.arange(scores.shape[-2]) if rows is None else rows.clamp(min=0)
        scores = scores.masked_fill(torch.arange(scores.shape[-1]) > rows[:, None], -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e9) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ value


def _cross_entropy(logits, target, weight, ignore_index, label_smoothing):
    return torch.nn.functional.cross_entropy(
        logits, target, weight, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing
    )


OWN: dict[str, Callable[..., Tensor]] = {
    "planc.attention": _attention,
    "planc.cast": lambda value, dtype: value.to(getattr(torch, dtype.removeprefix("torch."))),
    "planc.cross_entropy": _cross_entropy,
    "planc.dropout": lambda value, p, site: value * dropped(value.shape, held(value.shape, Layout(), Mesh(()), {}), p),
}


def dropped(shape: Sequence[int], where: Sequence[Tensor], p: float) -> Tensor:
    """A mask that depends on the global position of an element alone."""
    index = torch.zeros((), dtype=torch.long)
    for size, along in zip(shape, where):
        index = index[..., None] * size + along
    return (index * 7919 % 100 >= 100 * p) / (1 - p)


class Simulator:
    """Runs a graph with layouts on all ranks."""

    def __init__(self, graph: Graph, mesh: Mesh):
        self.graph, self.mesh = graph, mesh
        self.collectives = Collectives(mesh)
        self.parts: dict[Value, Parts] = {}
        self.gathered: dict[Value, Parts] = {}

    def run(self, inputs: Mapping[Value, Parts]) -> dict[Value, Parts]:
        self.parts = dict(inputs)
        for node in self.graph.nodes:
            if node.op in REDISTRIBUTIONS:
                self.parts[node.outputs[0]] = self.collectives.run(node, self.parts[node.args[0]])
                continue
            self.exchange(node)
            for rank, at in enumerate(self.collectives.ranks):
                results = self.compute(node, rank, at)
                for out, tensor in zip(node.outputs, results):
                    if out is not None:
                        self.parts.setdefault(out, []).append(tensor)
                        fits = tensor.shape == shape_of(out, self.mesh)
                        assert fits, f"{node.op} made {tuple(tensor.shape)} for {out.layout}"
        return self.parts

    def exchange(self, node: Node) -> None:
        """An operator over a dimension that is cut exchanges what it needs: here, everything."""
        rule = rule_of(node)
        self.gathered = {}
        for value, dims in zip(node.inputs, rule.operands):
            for dim, names in enumerate(dims):
                axes = shard_axes(value.layout, Shard(dim), self.mesh)
                if axes and rule.collective & set(names):
                    cut = (axes, dim, 1, value.shape[dim], 1)
                    there = lambda parts, cut=cut: self.collectives.all_gather(parts, *cut)
                    # Ranks that each make a part of the result each have a term of the gradient.
                    apart = any(names == kept for kept in rule.results[0] or ())
                    how = self.collectives.reduce_scatter if apart else self.collectives.shard
                    back = lambda parts, cut=cut, how=how: how(parts, *cut, zero=True)
                    self.gathered[value] = list(Exchange.apply(there, back, *self.parts[value]))

    def own_part(self, node: Node, k: int, tensor: Tensor | None, at: Mapping[str, int]) -> Tensor | None:
        """Of result k that has a dimension along which everything was exchanged."""
        out, rule = node.outputs[k], rule_of(node)
        if out is None or tensor is None:
            return tensor
        for dim, names in enumerate(rule.results[k] or ()):
            if rule.collective & set(names):
                tensor = tensor.index_select(dim, held(out.shape, out.layout, self.mesh, at)[dim].clamp(min=0))
        return tensor

    def own_positions(self, value: Value, dim: int, index: Tensor, at: Mapping[str, int]) -> tuple[Tensor, Tensor]:
        """(where in this rank's part the positions are, whether it has them)."""
        found = (index[..., None] == held(value.shape, value.layout, self.mesh, at)[dim]).long()
        return found.argmax(-1), found.any(-1)

    def looked_up(self, node: Node, rank: int, at: Mapping[str, int]) -> Tensor:
        """Of a table that is cut by rows: zero for the rows of others."""
        given = arguments(node)
        table, tokens = given["weight"], self.parts[given["indices"]][rank]
        local, mine = self.own_positions(table, 0, tokens, at)
        entries = self.parts[table][rank][local]
        entries = torch.where((tokens == given["padding_idx"])[..., None], entries.detach(), entries)
        return torch.where(mine[..., None], entries, torch.zeros_like(entries))

    def gather(self, node: Node, rank: int, at: Mapping[str, int]) -> Tensor:
        """Zero for what others have."""
        value, dim, index = node.args
        dim %= max(len(value.shape), 1)
        if not value.shape:
            return self.parts[value][rank].gather(dim, self.parts[index][rank])
        local, mine = self.own_positions(value, dim, self.parts[index][rank], at)
        entries = self.parts[value][rank].gather(dim, local)
        return torch.where(mine, entries, torch.zeros_like(entries))

    def compute(self, node: Node, rank: int, at: Mapping[str, int]) -> list[Tensor | None]:
        if node.op == "planc.count":
            given, out = arguments(node), node.outputs[0]
            total = math.prod(given["input"].shape[dim] for dim in given["dims"])
            return [torch.tensor(total, dtype=getattr(torch, out.dtype))]
        if node.op == "planc.dropout":
            value, p, _ = node.args
            return [self.parts[value][rank] * dropped(value.shape, held(value.shape, value.layout, self.mesh, at), p)]
        if node.op == "planc.attention":
            query, *others = (self.parts[x][rank] if isinstance(x, Value) else x for x in node.args)
            return [_attention(query, *others, held(node.args[0].shape, node.args[0].layout, self.mesh, at)[-2])]
        if node.op == "aten.embedding.default":
            return [self.looked_up(node, rank, at)]
        if node.op == "aten.gather.default":
            return [self.gather(node, rank, at)]
        parts = self.parts | self.gathered
        op, args, kwargs = localized(node, self.mesh)
        args, kwargs = map_values((args, kwargs), lambda value: parts[value][rank])
        results = evaluate(op, args, kwargs)
        return [self.own_part(node, k, tensor, at) for k, tensor in enumerate(results)] if self.gathered else results
