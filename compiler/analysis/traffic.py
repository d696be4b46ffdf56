"""The traffic reader: what a rank sends in one step, over which axes, by which collective, and what for.

Read from a dry run, so it is what the transport is asked to do; bytes are those that its counters count
(`runtime.transport.calls.sent_bytes`): of a bandwidth-optimal algorithm, whatever the backend really does.

The known closed forms follow. With Ψ parameters and N data-parallel ranks, in elements per rank and step: data
parallelism and ZeRO 1 and 2 send 2Ψ(N−1)/N, ZeRO 3 sends 3Ψ(N−1)/N (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from compiler.analysis.dry_run import DryRun, Step
from compiler.analysis.events import Communicate

PURPOSES: dict[str, str] = {
    "prologue": "counts of the batch",
    "forward": "activations",
    "backward": "activations",
    "backward_input": "activations",
    "backward_weight": "activations",
    "gather": "parameters",
    "reduce": "gradients",
    "reduce_across": "gradients",
    "send": "pipeline",
    "recv": "pipeline",
    "finite": "overflow",
    "clip": "gradient norm",
    "update": "buffers",
    "report": "report",
}
"""What an instruction communicates for."""


@dataclass(frozen=True)
class Flow:
    """Equal communications of a step: `calls` of them, each of `full` bytes (of the whole value), and `sent` bytes of
    all together. `op` and `target` are the instruction's; `line` is that of a segment's code, 0 for what the
    instruction does itself."""

    purpose: str
    op: str
    target: str
    line: int
    kind: str
    axes: tuple[str, ...]
    ranks: int
    full: int
    calls: int
    sent: int


@dataclass(frozen=True)
class Traffic:
    """What one rank of a pipeline stage sends in a step."""

    stage: int
    flows: tuple[Flow, ...]

    @property
    def sent(self) -> int:
        return sum(flow.sent for flow in self.flows)

    def by_axes(self) -> dict[tuple[str, ...], int]:
        """Bytes sent over each set of axes."""
        return self._sums(lambda flow: flow.axes)

    def by_kind(self) -> dict[str, int]:
        """Bytes sent by each kind of collective."""
        return self._sums(lambda flow: flow.kind)

    def by_purpose(self) -> dict[str, int]:
        """Bytes sent for each purpose."""
        return self._sums(lambda flow: flow.purpose)

    def _sums(self, key) -> dict:  # type: ignore[no-untyped-def, type-arg]
        found: Counter = Counter()  # type: ignore[type-arg]
        for flow in self.flows:
            found[key(flow)] += flow.sent
        return dict(found.most_common())


def read_traffic(run: DryRun) -> Traffic:
    """The traffic of a step, equal communications together, in the order of their first."""
    counts: Counter[tuple] = Counter()  # type: ignore[type-arg]
    for step, event in communications(run.steps):
        op = step.instruction.op
        where = (PURPOSES.get(op, op), op, " ".join(step.instruction.targets), event.line)
        counts[*where, event.kind, event.axes, len(event.group), event.full, event.sent] += 1
    return Traffic(run.stage, tuple(Flow(*key[:-1], calls, calls * key[-1]) for key, calls in counts.items()))


def communications(steps: Iterable[Step]) -> Iterable[tuple[Step, Communicate]]:
    for step in steps:
        yield from ((step, event) for event in step.events if isinstance(event, Communicate))
