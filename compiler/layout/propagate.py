"""Layout propagation: from the layouts of the inputs to a layout for every value, with redistributions in between.

For each node, in execution order, and for each mesh axis, the candidates are

    factor f     every operand that has f is cut along it, the others are used whole in work that differs (`V`);
                 a result with f is cut, one without is partial
    pass         the operator is linear in some operands and all of them are partial: so are the results
    whole        every operand whole, so every result

and the cheapest in communicated bytes is taken (forward and the implied backward), a cut before a pass before whole.
An operator without a rule has only `whole`.

Micro-batches are an axis too, in time: there nothing can be communicated inside a segment. A value that would have
to be is *hoisted* where it depends on the batch alone (computed once a step, over all micro-batches, before the
first); where it depends on parameters, the plan cannot keep the model's meaning and `TimeMixing` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compiler.ir.graph import Graph, Node, Value, map_values
from compiler.layout.factors import cut_factors, innermost, nested_cuts, pieces_along, refined, shard_for, taken_apart
from compiler.layout.joined import order_of, pieces_of_part, pieces_of_whole
from compiler.layout.placement import Layout, Mesh, P, Partial, Placement, R, Replicate, Shard, V, Varying, shard_axes
from compiler.layout.redistribute import Redistributor
from compiler.layout.rule import Dims, Method, Rule, rule_of
from runtime.cuts import piece_lengths

INFINITE = float("inf")
ASKED_FOR = 1e6
"""How much dearer than its bytes it is to undo a cut of a parameter, which the plan made to divide the work, or to
divide the work of a parameter that the plan wants used in the same way everywhere."""


class TimeMixing(Exception):
    """A node mixes micro-batches and depends on parameters."""

    def __init__(self, node: Node, value: Value):
        super().__init__(f"{node.op} needs all micro-batches of %{value.name}")
        self.node, self.value = node, value


class NeedsHoist(Exception):
    """These values of the source graph must be computed before the first micro-batch."""

    def __init__(self, values: set[Value]):
        super().__init__(", ".join(value.name for value in values))
        self.values = values


@dataclass
class Propagation:
    """What propagation found: the new graph, where each old value went, and what was done without a rule. `made` has the
    layouts that new values were also brought to."""

    graph: Graph
    values: dict[Value, Value]
    fallbacks: list[Node] = field(default_factory=list)
    made: Mapping[Value, Sequence[Layout]] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """One axis's decision at one node: `factor` to cut in which `order`, or "pass", or "whole". Operands that lack the
    factor are cut along the one that is `paired` with it, if there is one; of a joined index cut in pieces, its parts are
    cut each in its pieces."""

    kind: str
    factor: str = ""
    order: str = ""
    paired: str = ""

    def along(self, dims: Dims, rule: Rule) -> tuple[str, str]:
        """The factor that the choice cuts of a value with these dimensions, if it has one, and the order."""
        parts = rule.joined.get(self.factor, ())
        for k, part in enumerate(parts):
            if has(dims, part):
                pieces = pieces_of_part(piece_lengths(self.order), [rule.sizes[name] for name in parts], k)
                return part, order_of(pieces or ())
        return self.paired if self.paired and not has(dims, self.factor) else self.factor, self.order


@dataclass(frozen=True)
class Decision:
    """What is done at one node: a choice for each axis, and from it the layouts of operands and results."""

    rule: Rule
    choices: Mapping[str, Choice]
    targets: list[Layout]
    results: list[Layout | None]
    back: Mapping[str, Choice]


def propagate(
    graph: Graph,
    mesh: Mesh,
    layouts: Mapping[Value, Layout],
    time_axis: str | None = None,
    rows: int = 0,
    hoistable: Callable[[Value], bool] = lambda value: False,
    placed: Mapping[Value, Mapping[str, Placement]] = {},
    methods: Mapping[str, str] = {},
    made: Mapping[Value, Iterable[Layout]] = {},
    decisions: dict[Any, Decision] | None = None,
) -> Propagation:
    """Give every value a layout. `layouts` are those of the graph's inputs (replicated if absent).

    `methods` names for an axis the method to take where an operator has one of that name. `time_axis` names the axis of
    micro-batches. `rows`: the rows of a batch if only the first may be real (the last batch of an epoch), so what is
    summed over the batch is masked. Who propagates a graph piece by piece passes what layouts inputs were already
    brought to (`made`), and the `decisions` on this mesh so far. Raises NeedsHoist with every value to hoist that one
    sweep finds, or TimeMixing.
    """
    sweep = _Propagator(graph, mesh, layouts, time_axis, rows, hoistable, placed, methods)
    sweep.already(made)
    if decisions is not None:
        sweep.decisions = decisions
    return sweep.run()


class _Propagator:
    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        layouts: Mapping[Value, Layout],
        time_axis: str | None,
        rows: int,
        hoistable: Callable[[Value], bool],
        placed: Mapping[Value, Mapping[str, Placement]],
        methods: Mapping[str, str],
    ):
        self.placed, self.methods = placed, methods
        self.source, self.mesh, self.time_axis, self.hoistable = graph, mesh, time_axis, hoistable
        self.graph = Graph(graph.name)
        self.moves = Redistributor(self.graph, mesh, time_axis, rows)
        self.moves.taken |= {value.name for value in graph.values()}
        self.env: dict[Value, Value] = {}
        self.fallbacks: list[Node] = []
        self.decisions: dict[Any, Decision] = {}
        self.spellings: dict[Any, list[Layout]] = {}
        self.to_hoist: set[Value] = set()
        # The axes that cut the data: there all weights are `V`, and it is the data that divides the work.
        self.data_axes = {time_axis} | {
            axis for value in graph.inputs if value.kind != "param" for axis in layouts.get(value, ())
        } | set(methods)
        for value in graph.inputs:
            new = Value(value.name, value.dtype, value.shape, value.kind, value.differentiable)
            new.layout = layouts.get(value, Layout())
            self.env[value] = new
            self.graph.inputs.append(new)

    def already(self, made: Mapping[Value, Iterable[Layout]]) -> None:
        """Inputs that stand for what other inputs were already brought to."""
        for value, layouts in made.items():
            for layout in sorted(layouts, key=str):
                copy = Value(self.moves.fresh(value.name), value.dtype, value.shape, "slot", value.differentiable, layout)
                self.graph.inputs.append(copy)
                self.moves.adopt(self.env[value], copy)

    def run(self) -> Propagation:
        for node in self.source.nodes:
            self.visit(node)
        if self.to_hoist:
            raise NeedsHoist(self.to_hoist)
        for role, value in self.source.outputs.items():
            self.graph.outputs[role] = self.env[value]
        self.graph.nodes = self.moves.ordered()
        return Propagation(self.graph, self.env, self.fallbacks, self.moves.made)

    def visit(self, node: Node) -> None:
        operands = self.spelled(node, [self.env[value] for value in node.inputs])
        decision = self.decide(node, operands)
        if decision.rule.fallback:
            self.fallbacks.append(node)
        self.check_time(node, operands, decision.targets)
        moved = [self.moves.to(value, target, node.origin) for value, target in zip(operands, decision.targets)]
        moved = self.mask_padding(node, decision.rule, moved, decision.choices)
        self.emit(node, moved, decision.results)
        if decision.back:
            self.bring_back(node, decision)

    def spelled(self, node: Node, operands: list[Value]) -> list[Value]:
        """The operands, with cuts that several axes make together as the rule can follow them."""
        general = rule_of(node)
        layouts = tuple(value.layout or Layout() for value in operands)
        found = self.spellings.get((id(general), layouts))
        if found is None:
            rule = refined(general, operands, layouts, self.mesh)
            found = self.spellings[id(general), layouts] = [
                nested_cuts(layout, dims, rule, value.shape, self.mesh)
                for layout, dims, value in zip(layouts, rule.operands, operands)
            ]
        return [self.moves.respelled(value, layout, node.origin) for value, layout in zip(operands, found)]

    def decide(self, node: Node, operands: list[Value]) -> Decision:
        """The decision for a call; calls of one rule on operands with the same layouts are decided once."""
        general = rule_of(node)
        asked = tuple(
            (value.layout, value.differentiable, self.moves.is_weight(value), frozenset(self.moves.made.get(value, ())))
            for value in operands
        )
        alike = (id(general), asked, tuple(out is not None and out.differentiable for out in node.outputs))
        found = self.decisions.get(alike)
        if found is None:
            rule = refined(general, operands, [value.layout for value in operands], self.mesh)
            rule = self.nested(rule, operands)
            choices: dict[str, Choice] = {}
            for axis in self.mesh.names:
                choices[axis] = self.choose(axis, node, rule, operands, choices)
            targets = [self.operand_layout(k, rule, operands, choices) for k in range(len(operands))]
            results = [
                None if out is None or dims is None else self.result_layout(out, dims, rule, targets, choices)
                for out, dims in zip(node.outputs, rule.results)
            ]
            found = self.decisions[alike] = Decision(rule, choices, targets, results, self.back(rule, operands))
        return found

    # -- choosing ------------------------------------------------------------------------------------------------

    def choose(
        self, axis: str, node: Node, rule: Rule, operands: list[Value], chosen: Mapping[str, Choice]
    ) -> Choice:
        """The cheapest choice, given those on the axes outside this one; all axes cut a factor in one order."""
        asked = [k for k in range(len(operands)) if k not in rule.shape_only]
        places = [operands[k].layout[axis] for k in asked]
        if all(isinstance(place, (Replicate, Varying)) for place in places):
            return Choice("whole")
        cuts = {
            k: cut_factors(operands[k].layout, rule.operands[k], rule, operands[k].shape, self.mesh).get(axis)
            for k in asked
        }
        orders = {k: place.order for k in asked if isinstance(place := operands[k].layout[axis], Shard)}
        method = self.method(axis, rule, operands)
        if method is not None:
            factors = [innermost(name, rule) for name in method.cut]
            first = next((k for k, name in cuts.items() if name == factors[0]), None)
            return Choice("cut", factors[0], "" if first is None else orders[first], *factors[1:])
        candidates = list(
            dict.fromkeys(
                Choice("cut", name, orders[k])
                for k, name in cuts.items()
                if name is not None and self.may_cut(name, node, rule, orders[k], self.in_time(operands[k], axis))
            )
        )
        candidates += self.in_pieces(axis, rule, operands, chosen)
        candidates = [
            choice
            for choice in candidates
            if all(c.factor != choice.factor or c.order == choice.order for c in chosen.values() if c.kind == "cut")
        ]
        if any(isinstance(place, Partial) for place in places):
            candidates += [Choice("pass", str(k)) for k in range(len(rule.linear))]
        candidates.append(Choice("whole"))
        return min(candidates, key=lambda choice: self.cost(choice, axis, node, rule, operands, cuts, chosen))

    def in_pieces(
        self, axis: str, rule: Rule, operands: list[Value], chosen: Mapping[str, Choice]
    ) -> Iterator[Choice]:
        """Cuts of a joined index in pieces, where the whole is cut so already, or some of its parts are cut. (Where rows
        of the batch may not be real, all pieces must have as many.)"""
        if self.moves.rows and axis in self.data_axes:
            return
        for whole, parts in rule.joined.items():
            sizes = [rule.sizes[part] for part in parts]
            found = {
                name: pieces_along(name, value.layout[axis], dims, rule)
                for value, dims in zip(operands, rule.operands)
                for name in (whole, *parts)
                if has(dims, name) and isinstance(value.layout[axis], Shard)
            }
            pieces = found.get(whole, ())
            if not found.keys().isdisjoint(parts):
                pieces = pieces_of_whole([found.get(part, (1,)) for part in parts], sizes)
            choice = Choice("cut", whole, order_of(pieces))
            even = rule.sizes[whole] % (max(sum(pieces), 1) * self.ways(whole, {**chosen, axis: choice}, rule)) == 0
            if len(pieces) > 1 and even and all(pieces_of_part(pieces, sizes, k) for k in range(len(parts))):
                yield choice

    def method(self, axis: str, rule: Rule, operands: list[Value]) -> Method | None:
        """The method that a strategy asks for on the axis, where its operands are cut as it wants them."""
        method = rule.methods.get(self.methods.get(axis, ""))
        if method is None:
            return None
        cuts = [
            cut_factors(value.layout, dims, rule, value.shape, self.mesh).get(axis)
            for value, dims in zip(operands, rule.operands)
        ]
        return method if set(method.given) <= set(cuts) else None

    def nested(self, rule: Rule, operands: list[Value]) -> Rule:
        """The rule with the factor that a method cuts taken apart where another axis cuts it already: what of it is left
        to each of that axis's ranks is cut again."""
        for axis in self.mesh.names:
            method = self.method(axis, rule, operands)
            if method is None or len(method.cut) > 1 or method.cut[0] in method.given or method.cut[0] not in rule.sizes:
                continue
            (factor,) = method.cut
            cuts = [cut_factors(v.layout, dims, rule, v.shape, self.mesh) for v, dims in zip(operands, rule.operands)]
            axes = {other for found in cuts for other, name in found.items() if name == factor and other != axis}
            ways, size = math.prod(self.mesh.size(other) for other in axes), rule.sizes[factor]
            if ways > 1 and size % ways == 0 and size > ways:
                rule = taken_apart(rule, factor, {f"{factor}/0": ways, f"{factor}/1": size // ways})
        return rule

    def back(self, rule: Rule, operands: list[Value]) -> dict[str, Choice]:
        """For axes whose method says so: where the results are brought back to."""
        found = {}
        for axis in self.mesh.names:
            method = self.method(axis, rule, operands)
            if method is not None and method.back:
                places = [value.layout[axis] for value in operands]
                order = next(place.order for place in places if isinstance(place, Shard))
                found[axis] = Choice("cut", method.back, order)
        return found

    def in_time(self, value: Value, axis: str) -> bool:
        """Whether the value's cut over the axis is one into micro-batches, or of rows that may not all be real."""
        place = value.layout[axis]
        ragged = self.moves.rows > 0 and isinstance(place, Shard) and self.time_axis in shard_axes(value.layout, place, self.mesh)
        return axis == self.time_axis or ragged

    def may_cut(self, factor: str, node: Node, rule: Rule, order: str, in_time: bool) -> bool:
        """The gradient of a maximum over ranks is not local: only undifferentiated ones may be made so. An operator that
        communicates does so among ranks, not in time, and takes all rows for real."""
        if factor in rule.solid or (order and factor in rule.collective | rule.picked):
            return False
        if factor in rule.collective and in_time:
            return False
        if factor in rule.collective or rule.reduces.get(factor, "sum") == "sum":
            return True
        return all(
            has(dims, factor) or not out.differentiable
            for dims, out in zip(rule.results, node.outputs)
            if dims is not None and out is not None
        )

    def cost(
        self,
        choice: Choice,
        axis: str,
        node: Node,
        rule: Rule,
        operands: list[Value],
        cuts: Mapping[int, str | None],
        chosen: Mapping[str, Choice],
    ) -> float:
        """What the choice makes communicate over the axis, in elements, forward and backward.

        `cuts` says which factor each operand is cut along now.
        """
        total = 0.0
        for k, (value, dims) in enumerate(zip(operands, rule.operands)):
            place = value.layout[axis]
            if choice.kind == "cut" and isinstance(place, Shard) and (cuts.get(k), place.order) == choice.along(dims, rule):
                if self.gathered_outside(k, axis, rule, operands, chosen):
                    total += 1.0 + self.move_cost(value, axis, V if value.differentiable else R)
                continue
            target = self.operand_place(k, axis, rule, operands, {axis: choice})
            if target is None:
                return INFINITE
            if choice.kind == "cut" and axis not in self.data_axes and self.repeats(value, axis):
                total += elements(value) * ASKED_FOR
            total += self.move_cost(value, axis, target)
        if choice.kind == "pass" and axis != self.time_axis and self.mesh.size(axis) > 1:
            # What passes is still to be reduced. Over micro-batches it is not: there terms accumulate.
            total += sum(2.0 * elements(out) for out in node.outputs if out is not None)
        return total

    def repeats(self, value: Value, axis: str) -> bool:
        """Whether the plan wants all ranks of an axis to do the same with a weight, which then is no work to divide."""
        return isinstance(value.layout[axis], Varying) and self.moves.is_weight(value)

    def gathered_outside(
        self, k: int, axis: str, rule: Rule, operands: list[Value], chosen: Mapping[str, Choice]
    ) -> bool:
        """Whether an axis outside that cuts the same factor is gathered: cuts nest, so this one is gathered with it, and
        to keep it means to cut again."""
        place = operands[k].layout[axis]
        outside = (a for a in chosen if isinstance(place, Shard) and operands[k].layout[a] == place)
        return any(self.operand_place(k, a, rule, operands, chosen) != place for a in outside)

    def move_cost(self, value: Value, axis: str, target: Placement) -> float:
        place, size = value.layout[axis], float(elements(value))
        if place == target or self.mesh.size(axis) == 1 or self.moves.is_made(value, axis, target):
            return 0.0
        # A cast is free forward. Backward its gradient is summed, that of a parameter once a step.
        later = not value.differentiable or axis == self.time_axis or self.moves.is_weight(value)
        cast = 0.0 if later or not isinstance(target, (Varying, Partial)) else 2.0 * size
        if isinstance(place, Varying):
            return 0.0
        if isinstance(place, Replicate):
            return cast
        if axis == self.time_axis:
            return 1e18 if size > 1 else 1e17  # only by hoisting
        if isinstance(place, Partial):
            return size if isinstance(target, Shard) else 2.0 * size + cast
        if self.moves.is_weight(value):
            return size * ASKED_FOR
        return 2.0 * size if isinstance(target, Varying) and value.differentiable else size

    # -- layouts -------------------------------------------------------------------------------------------------

    def ways(self, factor: str, choices: Mapping[str, Choice], rule: Rule) -> int:
        factor = next((whole for whole, parts in rule.joined.items() if factor in parts), factor)
        return math.prod(
            self.mesh.size(axis) for axis, c in choices.items() if c.kind == "cut" and factor in (c.factor, c.paired)
        )

    def operand_place(
        self, k: int, axis: str, rule: Rule, operands: list[Value], choices: Mapping[str, Choice]
    ) -> Placement | None:
        """Where operand k must be on `axis`, or None if the choice is impossible."""
        value, choice = operands[k], choices[axis]
        place = value.layout[axis]
        if k in rule.shape_only:
            return place
        # In work that differs, or on what differs, an operand's gradient is a term of a sum.
        differs = choice.kind != "whole" and choice.factor not in rule.collective or any(
            isinstance(other.layout[axis], Varying) for i, other in enumerate(operands) if i not in rule.shape_only
        )
        whole: Placement = V if isinstance(place, Varying) or (differs and value.differentiable) else R
        if choice.kind == "whole":
            return whole
        term = place if isinstance(place, Partial) else P
        if choice.kind == "pass":
            if k not in rule.linear[int(choice.factor)]:
                return whole
            return term if term == P else None
        if k in rule.addends and not any(has(dims, choice.factor) for dims in rule.results if dims is not None):
            return term if term == P else None
        factor, order = choice.along(rule.operands[k], rule)
        ways = self.ways(factor, choices, rule)
        return shard_for(factor, rule.operands[k], rule, value.shape, ways, order) or whole

    def operand_layout(self, k: int, rule: Rule, operands: list[Value], choices: Mapping[str, Choice]) -> Layout:
        return Layout((axis, self.operand_place(k, axis, rule, operands, choices) or R) for axis in choices)

    def result_layout(
        self, out: Value, dims: Dims, rule: Rule, targets: list[Layout], choices: Mapping[str, Choice]
    ) -> Layout:
        places: dict[str, Placement] = {}
        for axis, choice in choices.items():
            if choice.kind == "pass":
                places[axis] = P
            elif choice.kind == "cut":
                factor, order = choice.along(dims, rule)
                shard = shard_for(factor, dims, rule, out.shape, self.ways(factor, choices, rule), order)
                reduced = R if choice.factor in rule.collective else Partial(rule.reduces.get(choice.factor, "sum"))
                places[axis] = shard or reduced
            elif out.differentiable and any(isinstance(layout[axis], Varying) for layout in targets):
                places[axis] = V
        return Layout(places)

    # -- emitting ------------------------------------------------------------------------------------------------

    def mask_padding(self, node: Node, rule: Rule, operands: list[Value], choices: Mapping[str, Choice]) -> list[Value]:
        """Neutral elements in the padding of what is about to be reduced over it."""
        cut = dict((choice.factor, axis) for axis, choice in choices.items() if choice.kind == "cut")
        for factor, axis in cut.items():
            alone = factor in rule.joined or factor in rule.collective | rule.picked
            if alone or any(has(dims, factor) for dims in rule.results if dims):
                continue
            reduction = rule.reduces.get(factor, "sum")
            holders = [k for k, dims in enumerate(rule.operands) if has(dims, factor)]
            # A zero in one of the multiplied operands is enough for a sum.
            for k in holders[:1] if reduction == "sum" else holders:
                operands[k] = self.moves.masked(operands[k], axis, reduction, node.origin)
        return operands

    def emit(self, node: Node, operands: list[Value], results: list[Layout | None]) -> None:
        queue = iter(operands)
        args, kwargs = map_values((node.args, node.kwargs), lambda _: next(queue))
        new = Node(node.op, args, kwargs, [], node.origin)
        for out, layout in zip(node.outputs, results):
            if out is None or layout is None:
                new.outputs.append(None)
                continue
            value = Value(out.name, out.dtype, out.shape, "", out.differentiable, layout, new)
            self.env[out] = value
            new.outputs.append(value)
        self.moves.append(new)
        for out in node.outputs:
            if out is not None and out in self.placed:
                value = self.env[out]
                assert value.layout is not None
                target = Layout({**{axis: value.layout[axis] for axis in value.layout}, **self.placed[out]})
                self.env[out] = self.moves.to(value, target, node.origin)

    def bring_back(self, node: Node, decision: Decision) -> None:
        choices = {**decision.choices, **decision.back}
        for out, dims in zip(node.outputs, decision.rule.results):
            if out is not None and dims is not None:
                value = self.env[out]
                target = self.result_layout(out, dims, decision.rule, decision.targets, choices)
                self.env[out] = self.moves.to(value, target, node.origin)

    # -- time ----------------------------------------------------------------------------------------------------

    def check_time(self, node: Node, operands: list[Value], targets: list[Layout]) -> None:
        """Collect values that would have to be communicated over micro-batches; go on as if they were whole."""
        axis = self.time_axis
        if axis is None or self.mesh.size(axis) == 1:
            return
        for k, (value, target) in enumerate(zip(operands, targets)):
            place, wanted = value.layout[axis], target[axis]
            if place == wanted or isinstance(place, (Replicate, Varying)):
                continue
            source = node.inputs[k]
            if not self.hoistable(source):
                raise TimeMixing(node, source)
            self.to_hoist.add(source)


def has(dims: Dims, factor: str) -> bool:
    return any(factor in names for names in dims)


def elements(value: Value) -> int:
    return math.prod(value.shape)
