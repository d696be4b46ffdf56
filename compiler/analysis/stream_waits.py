"""What the streams of different stages must keep together: messages meet, collectives agree, no circle of waits.

Between two stages each direction is a channel: its messages arrive in the order in which they are sent, so its receives
must be in that order. Collectives over the pipeline's axis (gradients of tied weights, the norm, reports) meet in the
order in which each member starts them; of two stages that share several, the order must be the same in both, whatever
their groups. Collectives within a stage are issued by one and the same stream on all members.

What is left is waiting: an instruction starts when the one before has returned; a message is complete when both ends
have started it and the one before it on its channel is complete; a collective, when all members have started it and
their one before it is complete; a wait returns when what it waits for is complete. If these rules have no circle,
every stream comes to its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import networkx

from compiler.analysis.stream_rules import Fault
from runtime.instructions import Instruction
from runtime.program import Bucket, Program

MESSAGES = ("send", "recv")
BACKGROUND = (*MESSAGES, "reduce", "reduce_across")
"""Operations that go on until a `wait`; what else meets other stages returns when they have met."""


@dataclass(frozen=True)
class Meeting:
    """A stage's part in a collective that other stages take part in, from instruction `index`."""

    stage: int
    index: int
    kind: str
    axes: tuple[str, ...]
    stages: tuple[int, ...]
    content: str

    @property
    def agreed(self) -> tuple[str, tuple[str, ...], tuple[int, ...], str]:
        """What must be the same on all members."""
        return self.kind, self.axes, self.stages, self.content

    def __str__(self) -> str:
        stages = ", ".join(map(str, self.stages))
        return f"{self.kind} of {self.content} over {', '.join(self.axes)} on stages {stages}"


def verify_waits(program: Program) -> list[Fault]:
    """What is wrong between the streams of a program."""
    if program.stages == 1:
        return []
    waits = _Waits(program)
    return [*waits.match_messages(), *waits.match_collectives()] or waits.circle()


def meetings(program: Program, stage: int, index: int, instruction: Instruction) -> Iterator[Meeting]:
    """The collectives over several stages that an instruction takes part in, in order."""
    buckets = {bucket.name: bucket for bucket in program.buckets}

    def meet(kind: str, axes: tuple[str, ...], content: str, stages: Sequence[int] = ()) -> Iterator[Meeting]:
        if program.pipeline in axes:
            members = tuple(stages or range(program.stages))
            if len(members) > 1:
                yield Meeting(stage, index, kind, axes, members, content)

    def flat(bucket: Bucket) -> str:
        return f"{bucket.reduce or bucket.dtype}[{bucket.numel}] {bucket.name}"

    if instruction.op == "reduce":
        bucket = buckets[instruction.target]
        kind = "reduce_scatter" if bucket.shard else "all_reduce"
        yield from meet(kind, bucket.shard or bucket.axes, flat(bucket), bucket.stages)
    elif instruction.op == "reduce_across":
        bucket = buckets[instruction.target]
        yield from meet("all_reduce", bucket.across, f"the own part of {flat(bucket)}", bucket.stages)
    elif instruction.op == "clip" and "grad_norm" in (program.clip or {}):
        for axes in sorted(set(program.norm_axes.values())):
            yield from meet("all_reduce", axes, "float64 squared norms")
    elif instruction.op == "finite":
        yield from meet("all_reduce", tuple(program.mesh), "max of what is not finite")
    elif instruction.op == "report":
        sets: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for output in program.outputs:
            sets.setdefault((output.axes, output.op), []).append(output.name)
        for (axes, op), names in sets.items():
            yield from meet("all_reduce", axes, f"float64[{len(names)}] {op} of {', '.join(names)}")


Node = tuple[str, int, int]  # "start" or "end" of an instruction, or "complete" for what it starts; stage, index


class _Waits:
    def __init__(self, program: Program):
        self.program = program
        stages = range(program.stages)
        self.meetings = [
            [m for k, item in enumerate(program.streams[stage]) for m in meetings(program, stage, k, item)]
            for stage in stages
        ]
        self.sends: dict[tuple[int, int], list[int]] = {}
        self.recvs: dict[tuple[int, int], list[int]] = {}
        for stage in stages:
            for k, item in enumerate(program.streams[stage]):
                if item.op == "send" and item.peer is not None:
                    self.sends.setdefault((stage, item.peer), []).append(k)
                elif item.op == "recv" and item.peer is not None:
                    self.recvs.setdefault((item.peer, stage), []).append(k)

    def fault(self, stage: int, index: int, message: str) -> Fault:
        return Fault(stage, index, self.program.streams[stage][index], message)

    def match_messages(self) -> Iterator[Fault]:
        """On each channel the k-th send meets the k-th receive; only the first difference is told."""
        streams = self.program.streams
        for channel in sorted({*self.sends, *self.recvs}):
            source, target = channel
            for s, r in zip_longest(self.sends.get(channel, ()), self.recvs.get(channel, ())):
                if r is None:
                    yield self.fault(source, s, f"stage {target} does not receive it")
                elif s is None:
                    yield self.fault(target, r, f"stage {source} does not send it")
                else:
                    sent, expected = streams[source][s], streams[target][r]
                    if (sent.target, sent.micro) == (expected.target, expected.micro):
                        continue
                    yield self.fault(
                        source, s, f"stage {target} receives `{expected}` (line {r + 1}) at this place of the channel"
                    )
                break

    def match_collectives(self) -> Iterator[Fault]:
        """Two stages start the collectives that they share in the same order; the first difference is told."""
        for a, mine in enumerate(self.meetings):
            for b in range(a + 1, self.program.stages):
                ours = [m for m in mine if b in m.stages]
                theirs = [m for m in self.meetings[b] if a in m.stages]
                for one, other in zip_longest(ours, theirs):
                    if one is not None and other is not None and one.agreed == other.agreed:
                        continue
                    there = one or other
                    assert there is not None
                    missing = f"{other} (line {other.index + 1})" if one and other else "nothing"
                    where = a if there.stage == b else b
                    yield self.fault(
                        there.stage, there.index, f"{there}, but stage {where} has {missing} at this place"
                    )
                    break

    def circle(self) -> list[Fault]:
        """The first circle of waits, told at one of its waits."""
        graph = self.graph()
        if networkx.is_directed_acyclic_graph(graph):
            return []
        found = networkx.find_cycle(graph)
        nodes = [edge[0] for edge in found]
        steps = list(pairwise([*nodes, nodes[0]]))
        first = next(k for k, (a, b) in enumerate(steps) if (a[0], b[0]) == ("end", "complete"))
        _, stage, index = nodes[first]
        told = self.tell(steps[first:] + steps[:first])
        return [self.fault(stage, index, "would wait for ever:" + "".join(f"\n  {line}" for line in told))]

    def tell(self, steps: Sequence[tuple[Node, Node]]) -> Iterator[str]:
        """A line for each stage of a circle: where it waits, and for what."""
        streams = self.program.streams
        stage = index = 0
        for (kind, here, line), (cause, where, other) in steps:
            if (kind, cause) == ("end", "complete"):
                stage, index = here, line
            elif (kind, cause) == ("complete", "start") and where != stage:
                yield (
                    f"stage {stage} waits at line {index + 1}, `{streams[stage][index]}`, "
                    f"for line {other + 1} of stage {where}, `{streams[where][other]}`"
                )

    def graph(self) -> networkx.DiGraph:
        """An edge from what waits to what it waits for."""
        graph = networkx.DiGraph()
        for stage, stream in enumerate(self.program.streams):
            started: dict[Instruction, int] = {}
            before: int | None = None
            together = {m.index for m in self.meetings[stage]}
            for k, item in enumerate(stream):
                starts = item.op in MESSAGES or k in together
                if not starts and not (item.op == "wait" and item.waited in started):
                    continue  # no other stage has a part in it
                graph.add_edge(("end", stage, k), ("start", stage, k))
                if before is not None:
                    graph.add_edge(("start", stage, k), ("end", stage, before))
                before = k
                if not starts:
                    graph.add_edge(("end", stage, k), ("complete", stage, started.pop(item.waited)))
                    continue
                graph.add_edge(("complete", stage, k), ("start", stage, k))
                if item.op in BACKGROUND:
                    started[item] = k
                else:
                    graph.add_edge(("end", stage, k), ("complete", stage, k))
        for (source, target), sends in self.sends.items():
            pairs = list(zip(sends, self.recvs.get((source, target), ())))
            for s, r in pairs:
                graph.add_edge(("complete", source, s), ("start", target, r))
                graph.add_edge(("complete", target, r), ("start", source, s))
            for (s, r), (s2, r2) in pairwise(pairs):
                graph.add_edge(("complete", source, s2), ("complete", source, s))
                graph.add_edge(("complete", target, r2), ("complete", target, r))
        self.add_collectives(graph)
        return graph

    def add_collectives(self, graph: networkx.DiGraph) -> None:
        """The n-th collective of a group: each member's completion waits for the start of all and for its last one."""
        rounds: dict[tuple[tuple[str, ...], tuple[int, ...], int], list[Meeting]] = {}
        for mine in self.meetings:
            count: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
            last: dict[tuple[tuple[str, ...], tuple[int, ...]], Meeting] = {}
            for meeting in mine:
                group = (meeting.axes, meeting.stages)
                count[group] = count.get(group, 0) + 1
                rounds.setdefault((*group, count[group]), []).append(meeting)
                if group in last and last[group].index != meeting.index:
                    graph.add_edge(
                        ("complete", meeting.stage, meeting.index), ("complete", meeting.stage, last[group].index)
                    )
                last[group] = meeting
        for members in rounds.values():
            for one in members:
                for other in members:
                    graph.add_edge(("complete", one.stage, one.index), ("start", other.stage, other.index))
