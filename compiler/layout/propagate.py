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

from compiler.ir.graph import Graph, Node, Value, map_values
from compiler.layout.factors import cut_factors, shard_for
from compiler.layout.placement import Layout, Mesh, P, Partial, Placement, R, Shard, V, Varying
from compiler.layout.redistribute import Redistributor
from compiler.layout.rule import Dims, Rule, rule_of

INFINITE = float("inf")


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


def propagate(
    graph: Graph,
    mesh: Mesh,
    layouts: Mapping[Value, Layout],
    time_axis: str | None = None,
    ragged: bool = False,
    hoistable: Callable[[Value], bool] = lambda value: False,
) -> Propagation:
    """Give every value a layout. `layouts` are those of the graph's inputs (replicated if absent).

    `time_axis` names the axis of micro-batches. `ragged`: only the first rows of a batch may be real (the last batch
    of an epoch), so what is summed over the batch is masked. Raises NeedsHoist with every value to hoist that one sweep finds, or TimeMixing.
    """
    return _Propagator(graph, mesh, layouts, time_axis, ragged, hoistable).run()


class _Propagator:
    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        layouts: Mapping[Value, Layout],
        time_axis: str | None,
        ragged: bool,
        hoistable: Callable[[Value], bool],
    ):
        self.source, self.mesh, self.time_axis, self.hoistable = graph, mesh, time_axis, hoistable
        self.graph = Graph(graph.name)
        self.moves = Redistributor(self.graph, mesh, time_axis if ragged else None)
        self.env: dict[Value, Value] = {}
        self.fallbacks: list[Node] = []
        self.to_hoist: set[Value] = set()
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
        rule = rule_of(node)
        if rule.fallback:
            self.fallbacks.append(node)
        operands = [self.env[value] for value in node.inputs]
        choices = {axis: self.choose(axis, node, rule, operands) for axis in self.mesh.names}
        targets = [self.operand_layout(k, rule, operands, choices) for k in range(len(operands))]
        self.check_time(node, operands, targets)
        moved = [
            self.moves.to(value, target, node.origin) for value, target in zip(operands, targets)
        ]
        moved = self.mask_padding(node, rule, moved, choices)
        self.emit(node, rule, moved, choices)

    # -- choosing ------------------------------------------------------------------------------------------------

    def choose(self, axis: str, node: Node, rule: Rule, operands: list[Value]) -> Choice:
        places = [value.layout[axis] for k, value in enumerate(operands) if k not in rule.shape_only]
        if all(isinstance(place, (type(R), Varying)) for place in places):
            return Choice("whole")
        factors: dict[str, None] = {}
        for k, (value, dims) in enumerate(zip(operands, rule.operands)):
            if k in rule.shape_only:
                continue
            cut = cut_factors(value.layout, dims, rule, value.shape, self.mesh).get(axis)
            if cut is not None and self.may_cut(cut, node, rule):
                factors[cut] = None
        candidates = [Choice("cut", name) for name in factors]
        if any(isinstance(place, Partial) for place in places):
            candidates += [Choice("pass", str(k)) for k in range(len(rule.linear))]
        candidates.append(Choice("whole"))
        return min(candidates, key=lambda choice: self.cost(choice, axis, rule, operands))

    def may_cut(self, factor: str, node: Node, rule: Rule) -> bool:
        if factor in rule.fixed:
            return False
        reduction = rule.reduces.get(factor, "sum")
        in_results = all(
            dims is None or any(factor in names for names in dims) for dims in rule.results
        )
        if in_results or reduction == "sum":
            return True
        # The gradient of a maximum over ranks is not local: only undifferentiated ones may be cut.
        return not any(out is not None and out.differentiable for out in node.outputs)

    def cost(self, choice: Choice, axis: str, rule: Rule, operands: list[Value]) -> float:
        total = 0.0
        differs = choice.kind != "whole"
        for k, value in enumerate(operands):
            place = value.layout[axis]
            target = self.operand_place(k, axis, rule, operands, {axis: choice})
            if target is None:
                return INFINITE
            size = math.prod(value.shape) or 1
            total += self.move_cost(place, target, size, value, axis, differs)
        return total

    def move_cost(self, place: Placement, target: Placement, size: int, value: Value, axis: str, differs: bool) -> float:
        if place == target or self.mesh.size(axis) == 1:
            return 0.0
        whole = isinstance(place, (type(R), Varying))
        if whole and isinstance(target, Shard):
            return 0.0
        if whole and isinstance(target, Varying):
            return 2.0 * size if value.kind != "param" and axis != self.time_axis else 0.0
        if axis == self.time_axis:
            return 1e18 if size > 1 else 1e17  # only by hoisting
        if whole and isinstance(target, Partial):
            return 2.0 * size
        if isinstance(place, Partial) and not isinstance(target, Shard):
            return 2.0 * size
        return float(size)

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
        whole: Placement = place if isinstance(place, Varying) else R
        differing: Placement = V if value.differentiable or isinstance(place, Varying) else whole
        if choice.kind == "whole":
            return whole
        if choice.kind == "pass":
            if k not in rule.linear[int(choice.factor)]:
                return differing
            return place if isinstance(place, Partial) and place.op == "sum" else P
        shard = shard_for(choice.factor, rule.operands[k], rule, value.shape, self.ways(choice.factor, choices))
        return shard if shard is not None else differing

    def operand_layout(self, k: int, rule: Rule, operands: list[Value], choices: Mapping[str, Choice]) -> Layout:
        return Layout((axis, self.operand_place(k, axis, rule, operands, choices) or R) for axis in choices)

    def result_layout(self, out: Value, dims: Dims, rule: Rule, operands: list[Value], choices: Mapping[str, Choice]):
        places: dict[str, Placement] = {}
        for axis, choice in choices.items():
            if choice.kind == "pass":
                places[axis] = P
            elif choice.kind == "cut":
                shard = shard_for(choice.factor, dims, rule, out.shape, self.ways(choice.factor, choices))
                places[axis] = shard or Partial(rule.reduces.get(choice.factor, "sum"))
            elif out.differentiable and any(isinstance(value.layout[axis], Varying) for value in operands):
                places[axis] = V
        return Layout(places)

    # -- emitting ------------------------------------------------------------------------------------------------

    def mask_padding(self, node: Node, rule: Rule, operands: list[Value], choices: Mapping[str, Choice]) -> list[Value]:
        """Neutral elements in the padding of what is about to be reduced over it."""
        done: set[str] = set()
        for axis, choice in choices.items():
            if choice.kind != "cut" or choice.factor in done or any(
                dims is not None and any(choice.factor in names for names in dims) for dims in rule.results
            ):
                continue
            done.add(choice.factor)
            reduction = rule.reduces.get(choice.factor, "sum")
            holders = [k for k, dims in enumerate(rule.operands) if any(choice.factor in names for names in dims)]
            # A zero in one of the multiplied operands is enough for a sum.
            for k in holders[:1] if reduction == "sum" else holders:
                operands[k] = self.moves.masked(operands[k], axis, reduction, node.origin)
        return operands

    def emit(self, node: Node, rule: Rule, operands: list[Value], choices: Mapping[str, Choice]) -> None:
        queue = iter(operands)
        args, kwargs = map_values((node.args, node.kwargs), lambda _: next(queue))
        new = Node(node.op, args, kwargs, [], node.origin)
        for out, dims in zip(node.outputs, rule.results):
            if out is None or dims is None:
                new.outputs.append(None)
                continue
            value = Value(out.name, out.dtype, out.shape, differentiable=out.differentiable, producer=new)
            value.layout = self.result_layout(out, dims, rule, operands, choices)
            self.env[out] = value
            new.outputs.append(value)
        self.moves.append(new)

    # -- time ----------------------------------------------------------------------------------------------------

    def check_time(self, node: Node, operands: list[Value], targets: list[Layout]) -> None:
        """Collect values that would have to be communicated over micro-batches; go on as if they were whole."""
        axis = self.time_axis
        if axis is None or self.mesh.size(axis) == 1:
            return
        for k, (value, target) in enumerate(zip(operands, targets)):
            place, wanted = value.layout[axis], target[axis]
            if place == wanted or isinstance(place, (type(R), Varying)):
                continue
            source = node.inputs[k]
            if not self.hoistable(source):
                raise TimeMixing(node, source)
            self.to_hoist.add(source)
