"""Redistribution: the nodes that bring a value from one layout to another, made once and shared.

| from → to   | node                          | transpose                  |
|-------------|-------------------------------|----------------------------|
| `S(d) → R`  | `planc.all_gather`            | `planc.shard`              |
| `S(d) → V`  | `planc.all_gather`            | `planc.reduce_scatter`     |
| `P → R`     | `planc.all_reduce`            | nothing (the gradient is `V`) |
| `P → S(d)`  | `planc.reduce_scatter`        | `planc.all_gather`         |
| `R → V`     | `planc.vary`                  | `planc.all_reduce`         |
| `R → S(d)`  | `planc.shard`                 | `planc.all_gather`         |
| `V → S(d)`  | `planc.shard`                 | `planc.unshard` (zeros elsewhere) |
| `V → P`     | `planc.first`                 | `planc.first`              |
| `S(i) → S(j)` | `planc.all_to_all`          | `planc.all_to_all`         |

A value that is cheap to make (a view, a mask from an `arange`, an `expand`) is not made whole and then cut: the cut
is moved through its producer, so that each rank makes only its part.
"""

from __future__ import annotations

import math

from compiler.ir.graph import Graph, Node, Origin, Value, map_values
from compiler.layout.factors import factor_at, shard_for
from compiler.layout.placement import (
    Layout,
    Mesh,
    P,
    Partial,
    Placement,
    R,
    Replicate,
    Shard,
    V,
    Varying,
    is_padded,
    shard_axes,
)
from compiler.layout.rule import rule_of


COLLECTIVES = ("planc.all_reduce", "planc.all_gather", "planc.reduce_scatter", "planc.all_to_all")


class Redistributor:
    """Appends nodes to a graph, redistributing values on the way."""

    def __init__(self, graph: Graph, mesh: Mesh, time_axis: str | None = None, rows: int = 0):
        self.graph, self.mesh = graph, mesh
        self.time_axis, self.rows = time_axis, rows
        self.cache: dict[tuple[Value, Layout], Value] = {}
        self.masks: dict[tuple[Value, Shard, str], Value] = {}
        self.after: dict[Node | None, list[Node]] = {None: []}
        self.main: list[Node] = []
        self.names: dict[str, int] = {}

    # -- node order ----------------------------------------------------------------------------------------------

    def append(self, node: Node) -> None:
        self.main.append(node)

    def ordered(self) -> list[Node]:
        """The nodes, with each communicated value placed right behind its producer, where all its users find it."""
        order: list[Node] = []

        def place(node: Node) -> None:
            order.append(node)
            for follower in self.after.get(node, ()):
                place(follower)

        for node in self.main:
            place(node)
        return order

    def fresh(self, base: str) -> str:
        count = self.names[base] = self.names.get(base, 0) + 1
        return f"{base}.{count}"

    # -- redistribution ------------------------------------------------------------------------------------------

    def to(self, value: Value, target: Layout, origin: Origin) -> Value:
        """`value` with the layout `target`."""
        if value.layout == target:
            return value
        found = self.cache.get((value, target))
        if found is None:
            found = self.pulled(value, target, origin) or self.stepwise(value, target, origin)
            self.cache[value, target] = found
        return found

    def stepwise(self, value: Value, target: Layout, origin: Origin) -> Value:
        """One axis after the other: first reductions and gathers, then casts, then cuts (the smallest moves last)."""
        summed = [axis for axis in self.mesh.names if isinstance(value.layout[axis], Partial)]
        reduced = [axis for axis in summed if isinstance(target[axis], (Replicate, Varying))]
        for op in dict.fromkeys(value.layout[axis].op for axis in reduced):
            axes = tuple(axis for axis in reduced if value.layout[axis] == Partial(op))
            value = self.step("planc.all_reduce", value, {axis: R for axis in axes}, (axes, op), origin)
        value = self.uneven_apart(value, target, origin)
        for wanted in (self.gathers, self.casts, self.cuts):
            for axis in self.mesh.names:
                if value.layout[axis] != target[axis]:
                    value = wanted(value, axis, target, origin)
        return value

    def gathers(self, value: Value, axis: str, target: Layout, origin: Origin) -> Value:
        now, place = value.layout[axis], target[axis]
        if isinstance(now, Partial) and isinstance(place, Shard):
            if now.op == "sum":
                return self.step("planc.reduce_scatter", value, {axis: place}, ((axis,), *self.cut(value, place)), origin)
            return self.step("planc.all_reduce", value, {axis: R}, ((axis,), now.op), origin)
        if isinstance(now, Shard):
            return self.gather(value, axis, place, origin)
        return value

    def uneven_apart(self, value: Value, target: Layout, origin: Origin) -> Value:
        """Uneven parts change their borders with the number of parts: gather them before more axes cut the factor."""
        for axis, place in target.items():
            if isinstance(place, Shard) and is_padded(value.shape, target, place, self.mesh):
                wanted, now = (shard_axes(layout, place, self.mesh) for layout in (target, value.layout))
                if now and now != wanted:
                    value = self.gather(value, now[0], R, origin)
        return value

    def gather(self, value: Value, axis: str, place: Placement, origin: Origin) -> Value:
        now = value.layout[axis]
        assert isinstance(now, Shard)
        shared = shard_axes(value.layout, now, self.mesh)
        if isinstance(place, Shard) and shared == (axis,) and self.can_exchange(value, axis, now, place):
            return self.step("planc.all_to_all", value, {axis: place}, (axis, now.dim, place.dim), origin)
        # Axes that cut one factor together nest: an outer one is gathered together with those inside it.
        axes = shared[shared.index(axis) :]
        whole = V if isinstance(place, Varying) and value.differentiable else R
        return self.step("planc.all_gather", value, dict.fromkeys(axes, whole), (axes, *self.cut(value, now)), origin)

    def can_exchange(self, value: Value, axis: str, now: Shard, place: Shard) -> bool:
        plain = now.outer == place.outer == 1 and now.unit == place.unit == 1 and now.dim != place.dim
        ways = self.mesh.size(axis)
        free = not any(isinstance(p, Shard) and p.dim == place.dim for p in value.layout.values())
        return plain and free and value.shape[now.dim] % ways == 0 and value.shape[place.dim] % ways == 0

    def casts(self, value: Value, axis: str, target: Layout, origin: Origin) -> Value:
        now, place = value.layout[axis], target[axis]
        if isinstance(place, Varying):
            if isinstance(now, Replicate):
                return self.step("planc.vary", value, {axis: V}, (axis,), origin)
        if isinstance(place, Partial) and isinstance(now, (Replicate, Varying)):
            if isinstance(now, Replicate) and value.differentiable:
                value = self.step("planc.vary", value, {axis: V}, (axis,), origin)
            return self.step("planc.first", value, {axis: P}, (axis,), origin)
        return value

    def cuts(self, value: Value, axis: str, target: Layout, origin: Origin) -> Value:
        """Cut along all axes of one factor at once: only so do uneven parts come out right."""
        place = target[axis]
        if not isinstance(place, Shard):
            return value
        shared = shard_axes(target, place, self.mesh)
        axes = tuple(a for a in shared if isinstance(value.layout[a], (Replicate, Varying)))
        return self.step("planc.shard", value, dict.fromkeys(axes, place), (axes, *self.cut(value, place)), origin)

    def cut(self, value: Value, shard: Shard) -> tuple[int, int, int, int]:
        """(dim, outer, count, unit) of a cut, the count being global: what a node needs to know of it."""
        return shard.dim, shard.outer, value.shape[shard.dim] // (shard.outer * shard.unit), shard.unit

    def step(self, op: str, value: Value, places: dict[str, Placement], args: tuple, origin: Origin) -> Value:
        layout = value.layout
        for axis, place in places.items():
            layout = layout.with_(axis, place)
        key = (value, layout)
        if key not in self.cache:
            communicates = op not in ("planc.shard", "planc.first")
            if op in COLLECTIVES and all(self.mesh.size(axis) == 1 for axis in places):
                op, args = "planc.alias", ()
            producer = value.producer
            node = Node(op, (value, *args), {}, [], producer.origin if communicates and producer else origin)
            out = Value(self.fresh(value.name), value.dtype, value.shape, differentiable=value.differentiable)
            out.layout, out.producer = layout, node
            node.outputs = [out]
            if communicates and producer is not None:
                self.after.setdefault(producer, []).append(node)
            else:
                self.append(node)
            self.cache[key] = out
        return self.cache[key]

    # -- pulling a cut through a cheap producer ----------------------------------------------------------------------

    def pulled(self, value: Value, target: Layout, origin: Origin) -> Value | None:
        """The part of a cheap value made directly, or None where that is impossible."""
        node = value.producer
        if node is None or len(node.outputs) != 1:
            return None
        changes = {axis: target[axis] for axis in self.mesh.names if target[axis] != value.layout[axis]}
        if not all(
            isinstance(place, Shard) and isinstance(value.layout[axis], (Replicate, Varying))
            for axis, place in changes.items()
        ):
            return None
        rule = rule_of(node)
        if not (rule.cheap or (not value.differentiable and not rule.fallback and self.is_small_work(node))):
            return None
        factors: dict[str, str] = {}
        for axis, place in changes.items():
            ways = math.prod(self.mesh.size(other) for other in shard_axes(target, place, self.mesh))
            factor = factor_at(place, rule.results[0], rule, value.shape, ways)
            if factor is None or factor in rule.fixed:
                return None
            factors[axis] = factor
        operands = []
        for dims, operand in zip(rule.operands, node.inputs):
            layout = operand.layout
            for axis, factor in factors.items():
                ways = math.prod(self.mesh.size(other) for other in shard_axes(target, changes[axis], self.mesh))
                shard = shard_for(factor, dims, rule, operand.shape, ways)
                whole = V if operand.differentiable else R
                layout = layout.with_(axis, shard or whole)
            operands.append(self.to(operand, layout, origin))
        queue = iter(operands)
        args, kwargs = map_values((node.args, node.kwargs), lambda _: next(queue))
        clone = Node(node.op, args, kwargs, [], Origin(origin.module, node.origin.source, node.origin.code))
        out = Value(self.fresh(value.name), value.dtype, value.shape, differentiable=value.differentiable)
        out.layout, out.producer = target, clone
        clone.outputs = [out]
        self.append(clone)
        return out

    def is_small_work(self, node: Node) -> bool:
        """Pointwise work without gradient (a mask, a position) is cheaper to repeat in part than to keep whole."""
        rule = rule_of(node)
        result = {name for names in rule.results[0] or () for name in names}
        return all(name in result for dims in rule.operands for names in dims for name in names)

    # -- padding -------------------------------------------------------------------------------------------------

    def masked(self, value: Value, axis: str, reduction: str, origin: Origin) -> Value:
        """`value` with the reduction's neutral element in the padding of its cut over `axis`."""
        shard = value.layout[axis]
        assert isinstance(shard, Shard)
        axes = shard_axes(value.layout, shard, self.mesh)
        ragged = self.rows > 0 and self.time_axis in axes
        if not ragged and not is_padded(value.shape, value.layout, shard, self.mesh):
            return value
        key = (value, shard, reduction)
        if key not in self.masks:
            dim, outer, count, unit = self.cut(value, shard)
            limit = ("rows", count // self.rows) if ragged else count
            node = Node("planc.mask", (value, axes, dim, outer, count, unit, limit, reduction), {}, [], origin)
            out = Value(self.fresh(value.name), value.dtype, value.shape, differentiable=value.differentiable)
            out.layout, out.producer = value.layout, node
            node.outputs = [out]
            self.append(node)
            self.masks[key] = out
        return self.masks[key]
