"""What a schedule takes: when each action runs, how long ranks are idle, how many activations are alive.

A discrete-event simulation: a rank works through its list in order, and an action starts when what it needs has ended
(and has arrived, if it comes from another rank). Sends and receives cost the ranks nothing but that delay.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.schedule.actions import Action, Pipeline, ScheduleError
from compiler.schedule.costs import StageCosts, equal_costs


class Deadlock(ScheduleError):
    """No rank can go on; the message shows who waits for whom, first the action `index` of `rank`."""

    def __init__(self, message: str, rank: int, index: int):
        super().__init__(message)
        self.rank, self.index = rank, index


@dataclass(frozen=True, slots=True)
class Span:
    """An action, from `start` to `end` in seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timing:
    """When each rank does what."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Seconds until the last rank is done."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank works."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds that each rank does not work before the last rank is done."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Idle time as a fraction of the ideal time, that of the rank with the most work."""
        ideal = max(self.busy)
        return self.makespan / ideal - 1 if ideal else 0.0


def simulate(pipeline: Pipeline, costs: StageCosts | None = None) -> Timing:
    """Run the schedule; without `costs` F, I and W take one second each and B two. Raises Deadlock."""
    costs = costs or equal_costs(pipeline.stages)
    seconds = {kind: [costs.seconds(kind, stage) for stage in range(pipeline.stages)] for kind in "FBIW"}
    rank_of, transfer = pipeline.rank_of, costs.transfer
    ended: dict[tuple[bool, int, int], float] = {}  # (is backward, stage, micro) → when it ended
    waiting: dict[tuple[bool, int, int], int] = {}
    spans: list[list[Span]] = [[] for _ in range(pipeline.ranks)]
    runnable = list(range(pipeline.ranks))
    while runnable:
        rank = runnable.pop()
        mine, actions = spans[rank], pipeline.actions[rank]
        now = mine[-1].end if mine else 0.0
        while len(mine) < len(actions):
            action = actions[len(mine)]
            kind, stage, micro = action.kind, action.stage, action.micro
            start = now
            for need in _needs(kind, stage, micro, pipeline.stages):
                if need not in ended:
                    waiting[need] = rank
                    break
                there = ended[need] + (transfer if rank_of[need[1]] != rank else 0.0)
                start = max(start, there)
            else:
                now = start + seconds[kind][stage]
                mine.append(Span(action, start, now))
                if kind != "W":
                    done = (kind != "F", stage, micro)
                    ended[done] = now
                    if done in waiting:
                        runnable.append(waiting.pop(done))
                continue
            break
    if waiting:
        raise _deadlock(pipeline, [len(done) for done in spans])
    return Timing(tuple(map(tuple, spans)))


def _needs(kind: str, stage: int, micro: int, stages: int) -> tuple[tuple[bool, int, int], ...]:
    """What must have ended before an action, as (is backward, stage, micro)."""
    if kind == "F":
        return ((False, stage - 1, micro),) if stage else ()
    if kind == "W":
        return ((True, stage, micro),)
    own = (False, stage, micro)
    return (own, (True, stage + 1, micro)) if stage + 1 < stages else (own,)


def _deadlock(pipeline: Pipeline, done: list[int]) -> Deadlock:
    """Follow who waits for whom, from the first rank that is not done, until a rank comes again."""
    finished = {
        (a.kind != "F", a.stage, a.micro) for k, n in enumerate(done) for a in pipeline.actions[k][:n] if a.kind != "W"
    }
    ahead: dict[tuple[bool, int, int], tuple[int, Action]] = {
        (a.kind != "F", a.stage, a.micro): (k, a)
        for k, n in enumerate(done) for a in pipeline.actions[k][n:] if a.kind != "W"
    }  # fmt: skip
    rank = next(k for k, n in enumerate(done) if n < len(pipeline.actions[k]))
    lines: dict[int, str] = {}
    while rank not in lines:
        stands = pipeline.actions[rank][done[rank]]
        need = next(n for n in _needs(stands.kind, stands.stage, stands.micro, pipeline.stages) if n not in finished)
        if need not in ahead:
            missing = f"{need[1]}{'B' if need[0] else 'F'}{need[2]}"
            return Deadlock(f"rank {rank} waits at {stands} for {missing}, which no rank does", rank, done[rank])
        where, action = ahead[need]
        lines[rank] = f"rank {rank} waits at {stands} for {action}" + (
            ", which comes later in its own list" if where == rank else f" of rank {where}"
        )
        rank = where
    cycle = list(lines.values())[list(lines).index(rank) :]
    return Deadlock("the ranks would wait for ever: " + "; ".join(cycle), rank, done[rank])


@dataclass(frozen=True)
class Peaks:
    """The most that is alive at once: micro-batches of each stage, micro-batches times stages on each rank, bytes on
    each rank."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    bytes: tuple[int, ...]


def peak_activations(pipeline: Pipeline, costs: StageCosts | None = None) -> Peaks:
    """Activations live from the forward to the end of the backward (or of its weight part). When does not matter: the
    order alone decides."""
    size = costs.activation if costs is not None else (1,) * pipeline.stages
    by_stage, by_rank, by_bytes = [0] * pipeline.stages, [0] * pipeline.ranks, [0] * pipeline.ranks
    for rank, actions in enumerate(pipeline.actions):
        alive = dict.fromkeys((a.stage for a in actions), 0)
        count = total = 0
        for action in actions:
            change = {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
            alive[action.stage] += change
            count, total = count + change, total + change * size[action.stage]
            by_stage[action.stage] = max(by_stage[action.stage], alive[action.stage])
            by_rank[rank], by_bytes[rank] = max(by_rank[rank], count), max(by_bytes[rank], total)
    return Peaks(tuple(by_stage), tuple(by_rank), tuple(by_bytes))
