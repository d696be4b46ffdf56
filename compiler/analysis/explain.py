"""Why a rank communicates: the communications of a step, each with its story and the lines of the plan behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from compiler.analysis.dry_run import DryRun
from compiler.analysis.stories import Story, StoryTeller
from compiler.analysis.traffic import Flow, read_traffic
from compiler.autodiff.partition import SegmentCode
from compiler.diagnostics import Span
from compiler.ir.graph import Node, Origin, Value
from compiler.tensor.styles import STYLES, names
from runtime.mesh import axis_of

if TYPE_CHECKING:
    from compiler.driver import Compilation

INSTRUCTIONS: dict[str, str] = {
    "gather": "their parameters are cut over {axes}, and the code reads whole ones",
    "reduce": "their gradients are sums over {axes}: each rank uses them on its own part of batch or activations",
    "reduce_across": "each group over {axes} has a term of the gradients that it has reduced inside",
    "send": "the next stage of the pipeline goes on with it",
    "recv": "the next stage of the pipeline goes on with it",
    "finite": "whether gradients overflowed is agreed over all ranks",
    "clip": "the norm is over all gradients, and {axes} cuts them",
    "update": "ranks of {axes} have statistics of their own, which are averaged",
    "report": "loss and metrics are sums over the ranks of {axes}",
}
"""Why an instruction communicates."""


@dataclass(frozen=True)
class Cause:
    """A line of the plan that has a part in it."""

    text: str
    span: Span


@dataclass(frozen=True)
class Explanation:
    """Communications of one origin: `flows` of a rank of the pipeline stage `stage`, why, and which lines of the plan make
    them so. `names` are, for each target of the flows, the modules, parameters and values that it is about."""

    stage: int
    flows: tuple[Flow, ...]
    story: Story
    causes: tuple[Cause, ...]
    names: Mapping[str, frozenset[str]]

    @property
    def calls(self) -> int:
        return sum(flow.calls for flow in self.flows)

    @property
    def sent(self) -> int:
        return sum(flow.sent for flow in self.flows)

    @property
    def full(self) -> int:
        """Bytes of the whole value, of the largest communication."""
        return max(flow.full for flow in self.flows)

    def about(self, name: str) -> Explanation | None:
        """The part of it that is about a module, a parameter, a value or a pattern of these; or "all"."""
        if name == "all":
            return self
        flows = tuple(flow for flow in self.flows if any(is_name(name, own) for own in self.names[flow.target]))
        return replace(self, flows=flows) if flows else None


def is_name(wanted: str, own: str) -> bool:
    """Whether `wanted` is the name, or a module above it, or a pattern that fits it."""
    return own == wanted or own.startswith(f"{wanted}.") or fnmatchcase(own, wanted)


@dataclass(frozen=True)
class Total:
    """What a rank of a pipeline stage communicates in a step: calls, and bytes sent."""

    stage: int
    calls: int
    sent: int


def totals(found: Iterable[Explanation]) -> list[Total]:
    """Of each stage that has a part in it; a sum over stages would be no rank's."""
    stages: dict[int, list[Explanation]] = {}
    for item in found:
        stages.setdefault(item.stage, []).append(item)
    return [
        Total(stage, sum(item.calls for item in own), sum(item.sent for item in own))
        for stage, own in sorted(stages.items())
    ]


def explain(compilation: Compilation, run: DryRun) -> list[Explanation]:
    """All communications of a stage's step, in the order of their first."""
    return _Explainer(compilation, run).all(read_traffic(run).flows)


def known_names(compilation: Compilation) -> list[str]:
    """What can be asked about: modules, parameters, and values of the graph with layouts."""
    graphs = filter(None, (compilation.assigned.main, compilation.assigned.prologue))
    values = [value.name for graph in graphs for value in graph.values()]
    modules = [path for path in compilation.captured.modules if path]
    return list(dict.fromkeys([*modules, *compilation.captured.parameters, *values]))


class _Explainer:
    def __init__(self, compilation: Compilation, run: DryRun):
        self.plan, self.run = compilation.plan, run
        self.kinds = compilation.linked.kinds
        program = compilation.program
        self.mesh = compilation.mesh
        self.segments = {
            s.name: s for s in (*compilation.linked.segments, *filter(None, [compilation.linked.prologue]))
        }
        self.calls = {call.name: call for call in (*program.calls, *filter(None, [program.prologue]))}
        self.buckets = {bucket.name: bucket for bucket in program.buckets}
        self.tellers: dict[str, StoryTeller] = {}

    def all(self, flows: Iterable[Flow]) -> list[Explanation]:
        groups: dict[tuple[object, ...], list[Flow]] = {}
        for flow in flows:
            where = (self.run.kinds[flow.target or flow.op], flow.line) if flow.line else self.alike(flow)
            groups.setdefault((flow.op, flow.kind, flow.axes, *where), []).append(flow)
        return [self.explain(group) for group in groups.values()]

    def alike(self, flow: Flow) -> tuple[object, ...]:
        """Buckets are each explained by themselves; other instructions of one operation together."""
        return (flow.target,) if flow.target in self.buckets else ()

    def explain(self, flows: list[Flow]) -> Explanation:
        first = flows[0]
        target = first.target or first.op
        node = self.run.node(target, first.line)
        if node is None or node.source is None:
            return self.instruction(flows)
        kind = self.kinds[self.run.kinds[target]]
        teller = self.tellers.setdefault(kind.name, StoryTeller(kind.graph, self.mesh))
        backward = first.op.startswith("backward")
        again = backward and node.inputs[0] in forward_values(kind.code)
        story = teller.tell(node.source, first.axes, backward and not again)
        if again:
            reasons = ("backward: computed again, as recomputation saves nothing of it", *story.reasons)
            story = Story(story.origin, story.value, story.after, story.path, reasons, story.involved)
        targets = list(dict.fromkeys(flow.target or flow.op for flow in flows))
        parameters = {call: list(self.parameters(kind.name, call, story.involved)) for call in targets}
        found = {
            "" if call == first.op else call: frozenset(
                {*self.names(kind.name, call, node.source, story), *parameters[call]}
            )
            for call in targets
        }
        causes = self.causes(first.axes, [name for names in parameters.values() for name in names])
        return Explanation(self.run.stage, tuple(flows), story, tuple(causes), found)

    def instruction(self, flows: list[Flow]) -> Explanation:
        first = flows[0]
        over = ", ".join(first.axes)
        bucket = self.buckets.get(first.target)
        parameters = bucket.parameters if bucket is not None else ()
        targets = list(dict.fromkeys(flow.target for flow in flows))
        value = listed(parameters or targets)
        why = INSTRUCTIONS.get(first.op, "the instruction communicates").format(axes=over)
        story = Story(Origin(), value, "", (), (why,))
        causes = tuple(self.causes(first.axes, [], first.op))
        modules = {name.rpartition(".")[0] for name in parameters}
        names = {flow.target: frozenset({*parameters, *modules, *flow.target.split()}) for flow in flows}
        return Explanation(self.run.stage, tuple(flows), story, causes, names)

    # -- names ---------------------------------------------------------------------------------------------------

    def parameters(self, kind: str, call: str, involved: Sequence[Value]) -> Iterator[str]:
        """The names of parameters among the inputs of a kind's graph, in one of its calls."""
        arguments = self.calls[call].arguments
        for value, reference in zip(self.kinds[kind].graph.inputs, arguments):
            if value in involved and reference.startswith("param:"):
                yield reference.removeprefix("param:")

    def names(self, kind: str, call: str, node: Node, story: Story) -> Iterator[str]:
        """The module, and the values as the segment's graph and the whole graph call them."""
        segment = self.segments[call]
        head, _, last = segment.unit.rpartition(".")
        module = node.origin.module
        yield module.replace(f"{head}.*", segment.unit, 1) if last.isdigit() and head else module
        for mine, theirs in zip(self.kinds[kind].graph.nodes, segment.nodes):
            pairs = [*zip(mine.outputs, theirs.outputs)]
            if mine is node:
                pairs += zip(mine.inputs, theirs.inputs)
            elif not any(own in story.involved[:2] for own in mine.outputs):
                continue
            for own, whole in pairs:
                yield from (value.name for value in (own, whole) if value is not None)

    # -- the plan ------------------------------------------------------------------------------------------------

    def causes(self, axes: Sequence[str], parameters: Iterable[str], op: str = "") -> Iterator[Cause]:
        """The lines that cut parameters over the axes, else the strategies over them."""
        found = list(dict.fromkeys(cause for name in parameters for cause in self.styles(axes, name)))
        yield from found
        for word, strategy in self.plan.strategies.items():
            over = [axis for axis in axes if axis_of(axis) in strategy.axes]
            if not over or (word == "zero" and op not in ("gather", "reduce", "reduce_across")):
                continue
            if not (found and word == "tensor"):
                yield Cause(f"{word} over {', '.join(strategy.axes)}", strategy.span)

    def styles(self, axes: Sequence[str], parameter: str) -> Iterator[Cause]:
        """The tensor-parallel pattern that names a parameter, where its axis is one of these."""
        tensor = self.plan.tensor
        if tensor is None or not any(axis_of(axis) in tensor.axes for axis in axes):
            return
        for style in STYLES:
            for pattern in getattr(tensor, style):
                if names(pattern, parameter):
                    yield Cause(f'{style} "{pattern.text}"', pattern.span)


def forward_values(code: SegmentCode) -> set[Value]:
    """What the forward has: a backward that communicates one of these does so again."""
    return {value for node in code.forward for value in (*node.inputs, *node.outputs) if value is not None}


def listed(items: Sequence[str], most: int = 3) -> str:
    """The first few, and how many more."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
