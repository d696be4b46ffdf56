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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from compiler.ir.graph import Graph, Node, Value, map_values
from compiler.layout.factors import cut_factors, refined, shard_for
from compiler.layout.placement import Layout, Mesh, P, Partial, Placement, R, Replicate, Shard, V, Varying
from compiler.layout.redistribute import Redistributor
from compiler.layout.rule import Dims, Rule, rule_of

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
    """What propagation found: the new graph, where each old value went, and what was done without a rule."""

    graph: Graph
    values: dict[Value, Value]
    fallbacks: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class Choice:
    """One axis's decision at one node: `factor` to cut, or "pass", or "whole"."""

    kind: str
    factor: str = ""


@dataclass(frozen=True)
class Decision:
    """What is done at one node: a choice for each axis, and from it the layouts of operands and results."""

    rule: Rule
    choices: Mapping[str, Choice]
    targets: list[Layout]
    results: list[Layout | None]


def propagate(
    graph: Graph,
    mesh: Mesh,
    layouts: Mapping[Value, Layout],
    time_axis: str | None = None,
    rows: int = 0,
    hoistable: Callable[[Value], bool] = lambda value: False,
    placed: Mapping[Value, Layout] = {},
) -> Propagation:
    """Give every value a layout. `layouts` are those of the graph's inputs (replicated if absent).

    `time_axis` names the axis of micro-batches. `rows`: the rows of a batch if only the first may be real (the last
    batch of an epoch), so what is summed over the batch is masked. Raises NeedsHoist with every value to hoist that
    one sweep finds, or TimeMixing.
    """
    return _Propagator(graph, mesh, layouts, time_axis, rows, hoistable, placed).run()


class _Propagator:
    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        layouts: Mapping[Value, Layout],
        time_axis: str | None,
        rows: int,
        hoistable: Callable[[Value], bool],
        placed: Mapping[Value, Layout],
    ):
        self.placed = placed
        self.source, self.mesh, self.time_axis, self.hoistable = graph, mesh, time_axis, hoistable
        self.graph = Graph(graph.name)
        self.moves = Redistributor(self.graph, mesh, time_axis, rows)
        self.moves.taken |= {value.name for value in graph.values()}
        self.env: dict[Value, Value] = {}
        self.fallbacks: list[Node] = []
        self.decisions: dict[Any, Decision] = {}
        self.to_hoist: set[Value] = set()
        # The axes that cut the data: there all weights are `V`, and it is the data that divides the work.
        self.data_axes = {time_axis} | {
            axis for value in graph.inputs if value.kind != "param" for axis in layouts.get(value, ())
        }
        for value in graph.inputs:
            new = Value(value.name, value.dtype, value.shape, value.kind, value.differentiable)
            new.layout = layouts.get(value, Layout())
            self.env[value] = new
            self.graph.inputs.append(new)

    def run(self) -> Propagation:
        for node in self.source.nodes:
            self.visit(node)
        if self.to_hoist:
            raise NeedsHoist(self.to_hoist)
        for role, value in self.source.outputs.items():
            self.graph.outputs[role] = self.env[value]
        self.graph.nodes = self.moves.ordered()
        return Propagation(self.graph, self.env, self.fallbacks)

    def visit(self, node: Node) -> None:
        operands = [self.env[value] for value in node.inputs]
        decision = self.decide(node, operands)
        if decision.rule.fallback:
            self.fallbacks.append(node)
        self.check_time(node, operands, decision.targets)
        moved = [self.moves.to(value, target, node.origin) for value, target in zip(operands, decision.targets)]
        moved = self.mask_padding(node, decision.rule, moved, decision.choices)
        self.emit(node, moved, decision.results)

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
            choices: dict[str, Choice] = {}
            for axis in self.mesh.names:
                choices[axis] = self.choose(axis, node, rule, operands, choices)
            targets = [self.operand_layout(k, rule, operands, choices) for k in range(len(operands))]
            results = [
                None if out is None or dims is None else self.result_layout(out, dims, rule, targets, choices)
                for out, dims in zip(node.outputs, rule.results)
            ]
            found = self.decisions[alike] = Decision(rule, choices, targets, results)
        return found

    # -- choosing ------------------------------------------------------------------------------------------------

    def choose(
        self, axis: str, node: Node, rule: Rule, operands: list[Value], chosen: Mapping[str, Choice]
    ) -> Choice:
        """The cheapest choice, given those on the axes outside this one."""
        asked = [k for k in range(len(operands)) if k not in rule.shape_only]
        places = [operands[k].layout[axis] for k in asked]
        if all(isinstance(place, (Replicate, Varying)) for place in places):
            return Choice("whole")
        cuts = {
            k: cut_factors(operands[k].layout, rule.operands[k], rule, operands[k].shape, self.mesh).get(axis)
            for k in asked
        }
        factors = dict.fromkeys(name for name in cuts.values() if name is not None and self.may_cut(name, node, rule))
        candidates = [Choice("cut", name) for name in factors]
        if any(isinstance(place, Partial) for place in places):
            candidates += [Choice("pass", str(k)) for k in range(len(rule.linear))]
        candidates.append(Choice("whole"))
        return min(candidates, key=lambda choice: self.cost(choice, axis, node, rule, operands, cuts, chosen))

    def may_cut(self, factor: str, node: Node, rule: Rule) -> bool:
        """The gradient of a maximum over ranks is not local: only undifferentiated ones may be made so."""
        if factor in rule.fixed:
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
        for k, value in enumerate(operands):
            if choice.kind == "cut" and cuts.get(k) == choice.factor:
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

    def ways(self, factor: str, choices: Mapping[str, Choice]) -> int:
        return math.prod(self.mesh.size(axis) for axis, c in choices.items() if c.kind == "cut" and c.factor == factor)

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
        return shard_for(choice.factor, rule.operands[k], rule, value.shape, self.ways(choice.factor, choices)) or whole

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
                shard = shard_for(choice.factor, dims, rule, out.shape, self.ways(choice.factor, choices))
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
            if factor in rule.collective | rule.picked or any(has(dims, factor) for dims in rule.results if dims):
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
