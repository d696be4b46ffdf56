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

import itertools
import math

from compiler.ir.graph import Graph, Node, Origin, Value, map_values
from compiler.layout.factors import cut_factors, refined, shard_for
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
        self.made: dict[Value, list[Layout]] = {}
        self.weights: dict[Value, bool] = {}
        self.after: dict[Node | None, list[Node]] = {None: []}
        self.early: set[Value] = set()  # what such nodes make: there as soon as what it is made of
        self.main: list[Node] = []
        self.names: dict[str, int] = {}
        self.taken = {value.name for value in graph.values()}

    # -- node order ----------------------------------------------------------------------------------------------

    def append(self, node: Node) -> None:
        self.main.append(node)

    def follow(self, producer: Node | None, node: Node) -> None:
        """Place a node right behind what it works on (None: an input of the graph)."""
        self.after.setdefault(producer, []).append(node)
        self.early.update(out for out in node.outputs if out is not None)

    def ordered(self) -> list[Node]:
        """The nodes, with each communicated value placed right behind its producer, where all its users find it; so are
        parts of what has no gradient (positions, rotary tables, masks), which all layers use alike."""
        order: list[Node] = []

        def place(node: Node) -> None:
            order.append(node)
            for follower in self.after.get(node, ()):
                place(follower)

        for node in (*self.after[None], *self.main):
            place(node)
        return order

    def fresh(self, base: str) -> str:
        """A name made from `base` that no value of the graph has."""
        while True:
            count = self.names[base] = self.names.get(base, 0) + 1
            if (name := f"{base}.{count}") not in self.taken:
                return name

    # -- redistribution ------------------------------------------------------------------------------------------

    def to(self, value: Value, target: Layout, origin: Origin) -> Value:
        """`value` with the layout `target`."""
        if value.layout == target:
            return value
        found = self.cache.get((value, target))
        if found is None:
            found = self.pulled(value, target, origin) or self.stepwise(value, target, origin)
            self.cache[value, target] = found
            self.made.setdefault(value, []).append(target)
        return found

    def adopt(self, value: Value, brought: Value) -> None:
        """`brought` is `value` in the layout that it has: no need to make it."""
        assert brought.layout is not None
        self.cache[value, brought.layout] = brought
        self.made.setdefault(value, []).append(brought.layout)

    def is_made(self, value: Value, axis: str, place: Placement) -> bool:
        """Whether some earlier user already had the value brought to `place` on the axis."""
        return any(layout[axis] == place for layout in self.made.get(value, ()))

    def stepwise(self, value: Value, target: Layout, origin: Origin) -> Value:
        """First reductions and gathers, then casts, then cuts (the smallest moves last), each axis after axis."""
        steps = (self.terms, self.sums, self.apart, self.scatter, self.gathers, self.scatter, self.casts, self.cuts)
        for move in steps:
            for axis in self.mesh.names:
                if value.layout[axis] != target[axis]:
                    value = move(value, axis, target, origin)
        if value.layout != target:
            raise AssertionError(f"no way from {value.layout} to {target} for %{value.name}")
        return value

    def terms(self, value: Value, axis: str, target: Layout, origin: Origin) -> Value:
        """From `V` to `R`: its gradient was to be a sum, so one rank keeps its copy as the only term of a sum."""
        now, place = value.layout[axis], target[axis]
        if isinstance(now, Varying) and isinstance(place, Replicate):
            op = "planc.first" if value.differentiable else "planc.alias"
            places = {axis: P if value.differentiable else R}
            return self.step(op, value, places, (axis,) if value.differentiable else (), origin)
        return value

    def sums(self, value: Value, axis: str, target: Layout, origin: Origin) -> Value:
        """Reduce to the whole, over all axes that need it at once, what cannot be reduced straight into parts."""
        now = value.layout[axis]
        if not isinstance(now, Partial):
            return value
        axes = tuple(
            other
            for other in self.mesh.names
            if value.layout[other] == now and target[other] != now and not self.scattered(value, other, target)
        )
        if axis not in axes:
            return value
        return self.step("planc.all_reduce", value, dict.fromkeys(axes, R), (axes, now.op), origin)

    def scattered(self, value: Value, axis: str, target: Layout) -> tuple[str, ...]:
        """The axes over which `P` becomes `S` in one reduce_scatter that includes this axis; none if it cannot be.

        Axes that cut one factor nest, outermost first: those that cut it already must be outside, those that will
        cut it afterwards inside. Uneven parts nest in no order.
        """
        place = target[axis]
        if not isinstance(place, Shard):
            return ()
        shared = shard_axes(target, place, self.mesh)
        stages = [0 if value.layout[other] == place else 1 if value.layout[other] == P else 2 for other in shared]
        summed = tuple(other for other, stage in zip(shared, stages) if stage == 1)
        nested = stages == sorted(stages) and (summed == shared or not is_padded(value.shape, target, place, self.mesh))
        return summed if axis in summed and nested else ()

    def apart(self, value: Value, axis: str, target: Layout, origin: Origin) -> Value:
        """Gather parts that do not nest with the cuts to come: uneven ones, and those outside which more axes cut."""
        place = target[axis]
        if not isinstance(place, Shard):
            return value
        wanted, now = (shard_axes(layout, place, self.mesh) for layout in (target, value.layout))
        uneven = any(is_padded(value.shape, layout, place, self.mesh) for layout in (target, value.layout))
        nested = wanted[: len(now)] == now[: len(wanted)] and not uneven
        return value if nested or not now else self.gather(value, now[0], Layout(), origin)

    def scatter(self, value: Value, axis: str, target: Layout, origin: Origin) -> Value:
        """Reduce straight into parts: at once where the dimension has no cuts that are to go, else after those went."""
        place = target[axis]
        if not isinstance(value.layout[axis], Partial) or not isinstance(place, Shard):
            return value
        held = [other for other in self.mesh.names if isinstance(value.layout[other], Shard)]
        if any(value.layout[other].dim == place.dim and value.layout[other] != target[other] for other in held):
            return value
        axes = self.scattered(value, axis, target)
        args = (axes, *held_cut(value, place, axes, self.mesh))
        return self.step("planc.reduce_scatter", value, dict.fromkeys(axes, place), args, origin)

    def gathers(self, value: Value, axis: str, target: Layout, origin: Origin) -> Value:
        now, place = value.layout[axis], target[axis]
        if not isinstance(now, Shard):
            return value
        if isinstance(place, Shard) and self.can_exchange(value, axis, target):
            return self.step("planc.all_to_all", value, {axis: place}, (axis, now.dim, place.dim), origin)
        return self.gather(value, axis, target, origin)

    def gather(self, value: Value, axis: str, target: Layout, origin: Origin) -> Value:
        """Axes that cut one factor together nest: an outer one is gathered together with those inside it."""
        now = value.layout[axis]
        assert isinstance(now, Shard)
        shared = shard_axes(value.layout, now, self.mesh)
        uneven = is_padded(value.shape, value.layout, now, self.mesh)
        axes = shared if uneven else shared[shared.index(axis) :]
        whole = V if value.differentiable and all(target[other] == V for other in axes) else R
        args = (axes, *held_cut(value, now, axes, self.mesh))
        return self.step("planc.all_gather", value, dict.fromkeys(axes, whole), args, origin)

    def can_exchange(self, value: Value, axis: str, target: Layout) -> bool:
        """Whether `S(i) → S(j)` is one all_to_all. The axis must be the innermost of those that cut the dimension, and of
        those that will cut the other one all outer ones, and they alone, must do so already. Other cuts of the two
        dimensions must be there to stay, and all even."""
        now, place = value.layout[axis], target[axis]
        assert isinstance(now, Shard) and isinstance(place, Shard)
        if now.dim == place.dim:
            return False
        cutting, wanted = shard_axes(value.layout, now, self.mesh), shard_axes(target, place, self.mesh)
        outer = tuple(itertools.takewhile(lambda other: other != axis, wanted))
        pairs = [(value.layout[other], target[other]) for other in self.mesh.names if other != axis]
        others = [pair for pair in pairs if any(isinstance(p, Shard) and p.dim in (now.dim, place.dim) for p in pair)]
        ends = ((value.layout, now), (target, place))
        even = not any(is_padded(value.shape, layout, shard, self.mesh) for layout, shard in ends)
        nested = cutting[-1] == axis and shard_axes(value.layout, place, self.mesh) == outer
        return nested and (not others or even and all(before == after for before, after in others))

    def casts(self, value: Value, axis: str, target: Layout, origin: Origin) -> Value:
        """To `V` over all axes that need it at once: their gradients then are summed in one step too."""
        now, place = value.layout[axis], target[axis]
        terms = tuple(
            other
            for other in self.mesh.names
            if isinstance(value.layout[other], Replicate) and value.differentiable and self.is_term(value, other, target)
        )
        if axis in terms:
            value = self.step("planc.vary", value, dict.fromkeys(terms, V), (terms,), origin)
        if isinstance(place, Varying) and not value.differentiable:
            return self.step("planc.alias", value, {axis: V}, (), origin)
        if isinstance(place, Partial) and isinstance(now, (Replicate, Varying)):
            return self.step("planc.first", value, {axis: P}, (axis,), origin)
        return value

    def is_term(self, value: Value, axis: str, target: Layout) -> bool:
        """Whether the gradient is to be a term of a sum on the axis: also where it is cut, unevenly and so in one go,
        together with an axis on which it is one."""
        place = target[axis]
        if not isinstance(place, Shard):
            return isinstance(place, (Varying, Partial))
        varies = any(value.layout[other] == V for other in shard_axes(target, place, self.mesh))
        return varies and is_padded(value.shape, target, place, self.mesh)

    def cuts(self, value: Value, axis: str, target: Layout, origin: Origin) -> Value:
        """Cut along all axes of one factor at once: only so do uneven parts come out right. (Where some are `R` and
        some `V`, their transposes differ: one after the other, from the outermost.)"""
        place = target[axis]
        if not isinstance(place, Shard):
            return value
        shared = shard_axes(target, place, self.mesh)
        whole = [other for other in shared if isinstance(value.layout[other], (Replicate, Varying))]
        axes = tuple(itertools.takewhile(lambda other: value.layout[other] == value.layout[whole[0]], whole))
        args = (axes, *held_cut(value, place, axes, self.mesh))
        return self.step("planc.shard", value, dict.fromkeys(axes, place), args, origin)

    def step(self, op: str, value: Value, places: dict[str, Placement], args: tuple, origin: Origin) -> Value:
        layout = value.layout
        for axis, place in places.items():
            layout = layout.with_(axis, place)
        key = (value, layout)
        if key not in self.cache:
            communicates = op not in ("planc.shard", "planc.first") and value.producer is not None
            shared = communicates or not value.differentiable
            if op in COLLECTIVES and all(self.mesh.size(axis) == 1 for axis in places):
                op, args = "planc.alias", ()
            producer = value.producer
            node = Node(op, (value, *args), {}, [], _home(producer) if shared else origin)
            out = Value(self.fresh(value.name), value.dtype, value.shape, differentiable=value.differentiable)
            out.layout, out.producer = layout, node
            node.outputs = [out]
            if shared:
                self.follow(producer, node)
            else:
                self.append(node)
            self.cache[key] = out
            self.made.setdefault(value, []).append(layout)
        return self.cache[key]

    def respelled(self, value: Value, layout: Layout, origin: Origin) -> Value:
        """`value` with another spelling of its layout: its parts stay as they are."""
        places = {axis: place for axis, place in layout.items() if value.layout[axis] != place}
        return self.step("planc.alias", value, places, (), origin) if places else value

    # -- pulling a cut through a cheap producer ----------------------------------------------------------------------

    def pulled(self, value: Value, target: Layout, origin: Origin) -> Value | None:
        """The part of a cheap value made directly, or None where that is impossible."""
        node = value.producer
        if node is None or len(node.outputs) != 1:
            return None
        changed = [axis for axis in self.mesh.names if target[axis] != value.layout[axis]]
        if any(isinstance(value.layout[axis], (Shard, Partial)) for axis in changed):
            return None
        rule = refined(rule_of(node), node.outputs, [target], self.mesh, "results")
        cast_weight = self.is_weight(value) and all(isinstance(target[axis], (Shard, Varying)) for axis in changed)
        if not cast_weight and not all(isinstance(target[axis], Shard) for axis in changed):
            return None
        if not (rule.cheap or (not value.differentiable and not rule.fallback and self.is_small_work(node))):
            return None
        found = cut_factors(target, rule.results[0] or (), rule, value.shape, self.mesh)
        if any(found.get(axis, "") is None or found.get(axis) in rule.solid for axis in changed):
            return None
        # Axes that cut one factor cut it together, so also those that did before are spelled anew in the operands.
        together = {axis for axis in found if found[axis] in {found.get(other) for other in changed}}
        operands = []
        for k, (dims, operand) in enumerate(zip(rule.operands, node.inputs)):
            layout = operand.layout
            for axis in changed if k not in rule.shape_only else ():
                layout = layout.with_(axis, V if operand.differentiable else R)
            for axis in together if k not in rule.shape_only else ():
                ways = math.prod(self.mesh.size(other) for other in together if found[other] == found[axis])
                shard = shard_for(found[axis], dims, rule, operand.shape, ways, target[axis].order)
                layout = layout.with_(axis, shard or layout[axis])
            operands.append(self.to(operand, layout, origin))
        queue = iter(operands)
        args, kwargs = map_values((node.args, node.kwargs), lambda _: next(queue))
        at_once = all(new is old or new in self.early for new, old in zip(operands, node.inputs))
        shared = not value.differentiable and at_once
        module = node.origin.module if shared else origin.module
        clone = Node(node.op, args, kwargs, [], Origin(module, node.origin.source, node.origin.code))
        out = Value(self.fresh(value.name), value.dtype, value.shape, differentiable=value.differentiable)
        out.layout, out.producer = target, clone
        clone.outputs = [out]
        if shared:
            self.follow(node, clone)
        else:
            self.append(clone)
        return out

    def is_weight(self, value: Value) -> bool:
        """Whether the value is a parameter, or a view or cast of one."""
        if value not in self.weights:
            node = value.producer
            derived = node is not None and bool(node.inputs) and rule_of(node).cheap
            self.weights[value] = value.kind == "param" or (derived and all(map(self.is_weight, node.inputs)))
        return self.weights[value]

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
        dim, outer, count, unit = held_cut(value, shard, axes, self.mesh)
        # An entry that holds several rows cannot be real in part: such programs take full batches (`joins_rows`).
        ragged = self.rows > 0 and self.time_axis in axes and count % self.rows == 0
        if not ragged and not is_padded(value.shape, value.layout, shard, self.mesh):
            return value
        key = (value, shard, reduction)
        if key not in self.masks:
            limit = ("rows", count // self.rows) if ragged else count
            node = Node("planc.mask", (value, axes, dim, outer, count, unit, limit, reduction), {}, [], origin)
            out = Value(self.fresh(value.name), value.dtype, value.shape, differentiable=value.differentiable)
            out.layout, out.producer = value.layout, node
            node.outputs = [out]
            self.append(node)
            self.masks[key] = out
        return self.masks[key]


def _home(producer: Node | None) -> Origin:
    """Where a redistribution that all users share belongs."""
    return producer.origin if producer is not None else Origin()


def held_cut(value: Value, shard: Shard, axes: tuple[str, ...], mesh: Mesh) -> tuple[int, int, int, int]:
    """(dim, outer, count, unit) of the cut over `axes`, of a tensor that has all of the value's other cuts."""
    layout, size = value.layout or Layout(), value.shape[shard.dim]
    outer, count, unit = shard.outer, size // (shard.outer * shard.unit), shard.unit
    others: dict[Shard, int] = {}
    for axis, place in layout.items():
        if isinstance(place, Shard) and place.dim == shard.dim and axis not in axes:
            others[place] = others.get(place, 1) * mesh.size(axis)
    for other, ways in others.items():
        whole, chunks = size // (other.outer * other.unit), other.chunks(ways)
        part = math.ceil(whole / chunks) * (chunks // ways)
        if other.outer < shard.outer:
            outer = outer * part // whole
        elif other.outer >= shard.outer * count and shard.unit > 1:
            unit = unit * part // whole
        else:
            count = count * part // whole
    return shard.dim, outer, count, unit
