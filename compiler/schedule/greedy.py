"""A list scheduler: whenever a rank is free it takes, of what it could do now, what a policy likes best.

Memory is kept by the banker's rule: the micro-batches on a rank leave room for a whole one, which the oldest that is
not done may use. So the oldest never waits for memory, and the ranks never wait for each other in a circle.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from compiler.schedule.actions import Action, Pipeline, pipeline
from compiler.schedule.costs import StageCosts


@dataclass(frozen=True)
class Policy:
    """What a rank likes best.

    `alive`: on each rank, the activations of at most so many micro-batches (also bounded by the costs' limit).
    `eager`: forwards before backwards. `deep`: of the forwards that of the last stage, not of the oldest micro-batch.
    `patience`: a weight part is not begun when an input part will be there within this fraction of its time.
    """

    alive: float
    eager: bool = False
    deep: bool = False
    patience: float = 0.0


def greedy(microbatches: int, rank_of: tuple[int, ...], costs: StageCosts, policy: Policy) -> Pipeline:
    """The schedule that the policy makes. The limit must hold one micro-batch on each rank."""
    return _Greedy(microbatches, rank_of, costs, policy).run()


class _Rank:
    """A rank at some time."""

    def __init__(self, stages: list[int], whole: int, limit: float):
        self.stages, self.whole, self.limit = stages, whole, limit
        self.actions: list[Action] = []
        self.free_at = 0.0
        self.used = 0
        self.forwards: list[tuple[int, int]] = []  # (stage, micro) whose input is here
        self.backwards: list[tuple[int, int]] = []
        self.weights: list[tuple[int, int]] = []
        self.coming: list[float] = []  # when gradients that are being computed will be here
        self.held: dict[int, int] = {}  # bytes of a micro-batch
        self.left: dict[int, int] = {}  # backwards that a micro-batch still has to do
        self.oldest = 0


class _Greedy:
    def __init__(self, microbatches: int, rank_of: tuple[int, ...], costs: StageCosts, policy: Policy):
        self.microbatches, self.rank_of, self.costs, self.policy = microbatches, rank_of, costs, policy
        self.last = len(rank_of) - 1
        self.ranks = []
        for rank in range(max(rank_of) + 1):
            stages = [stage for stage, where in enumerate(rank_of) if where == rank]
            whole = sum(costs.activation[stage] for stage in stages)
            limit = float("inf") if costs.limit is None else costs.limit
            self.ranks.append(_Rank(stages, whole, min(limit, whole * max(1.0, policy.alive))))
        self.ranks[rank_of[0]].forwards = [(0, micro) for micro in range(microbatches)]
        self.events: list[tuple[float, int, str, int, int]] = []  # time, rank, kind of what has come, stage, micro

    def run(self) -> Pipeline:
        now = 0.0
        for rank in range(len(self.ranks)):
            self.choose(rank, now)
        while self.events:
            now = self.events[0][0]
            touched: dict[int, None] = {}  # in order
            while self.events and self.events[0][0] == now:
                _, rank, kind, stage, micro = heapq.heappop(self.events)
                touched[rank] = None
                if kind == "F":
                    self.ranks[rank].forwards.append((stage, micro))
                elif kind == "I":
                    self.ranks[rank].backwards.append((stage, micro))
                    if now in self.ranks[rank].coming:
                        self.ranks[rank].coming.remove(now)
            for rank in touched:
                self.choose(rank, now)
        return pipeline(self.microbatches, self.rank_of, [rank.actions for rank in self.ranks])

    def choose(self, number: int, now: float) -> None:
        """Begin the next action of a rank, if it is free and there is one."""
        rank = self.ranks[number]
        if rank.free_at > now:
            return
        forward = min((f for f in rank.forwards if self.fits(rank, *f)), key=self.forward_order, default=None)
        backward = min(rank.backwards, key=lambda b: (b[1], -b[0]), default=None)
        if backward is not None and not (self.policy.eager and forward is not None):
            rank.backwards.remove(backward)
            self.begin(number, "I", *backward, now)
        elif forward is not None:
            rank.forwards.remove(forward)
            self.begin(number, "F", *forward, now)
        elif rank.weights:
            stage, micro = rank.weights[0]
            patience = self.policy.patience * self.costs.weight[stage]
            if not any(at - now < patience for at in rank.coming):
                rank.weights.pop(0)
                self.begin(number, "W", stage, micro, now)

    def forward_order(self, forward: tuple[int, int]) -> tuple[int, int]:
        stage, micro = forward
        return (-stage, micro) if self.policy.deep else (micro, -stage)

    def fits(self, rank: _Rank, stage: int, micro: int) -> bool:
        """Whether a forward leaves the bytes of a whole micro-batch to the oldest."""
        reserved = 0 if micro == rank.oldest else rank.whole - rank.held.get(rank.oldest, 0)
        return rank.used + self.costs.activation[stage] + reserved <= rank.limit

    def begin(self, number: int, kind: str, stage: int, micro: int, now: float) -> None:
        rank, size = self.ranks[number], self.costs.activation[stage]
        end = now + self.costs.seconds(kind, stage)
        rank.actions.append(Action(kind, stage, micro))
        rank.free_at = end
        heapq.heappush(self.events, (end, number, "", 0, 0))
        if kind == "F":
            rank.used += size
            rank.held[micro] = rank.held.get(micro, 0) + size
            if stage == self.last:
                self.send(number, number, "I", stage, micro, end)
            else:
                self.send(number, self.rank_of[stage + 1], "F", stage + 1, micro, end)
        elif kind == "I":
            rank.weights.append((stage, micro))
            if stage:
                self.send(number, self.rank_of[stage - 1], "I", stage - 1, micro, end)
        else:
            rank.used -= size
            rank.held[micro] -= size
            rank.left[micro] = rank.left.get(micro, len(rank.stages)) - 1
            while rank.left.get(rank.oldest) == 0:
                rank.oldest += 1

    def send(self, source: int, target: int, kind: str, stage: int, micro: int, at: float) -> None:
        arrives = at + (self.costs.transfer if source != target else 0.0)
        heapq.heappush(self.events, (arrives, target, kind, stage, micro))
        if kind == "I":
            self.ranks[target].coming.append(arrives)
