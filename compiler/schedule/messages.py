"""Messages: what pipeline stages send each other, and when.

A slot goes from the stage that makes it straight to each stage that reads it, however far apart they are; the gradient
that a reader has for it goes straight back. A send starts behind the work that makes what is sent, a receive is posted
`AHEAD` pieces of work before it is needed. Between two stages the receives are posted in the order of the sends, as the
messages of a channel arrive in order; a receive is posted earlier where that order asks for it. A send is waited for
where its message has arrived for certain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from compiler.schedule.work import Timeline, Work
from runtime.instructions import Instruction, wait_for

AHEAD = 1
"""Pieces of work between the posting of a receive and its first use."""


@dataclass(frozen=True)
class Sent:
    """A message: made by work `made` of the source, needed by work `needed` of the target."""

    slot: str
    micro: int
    source: int
    target: int
    made: int
    needed: int

    @property
    def send(self) -> Instruction:
        return Instruction("send", (self.slot,), self.micro, self.target)

    @property
    def receive(self) -> Instruction:
        return Instruction("recv", (self.slot,), self.micro, self.source)


def place_messages(timelines: Sequence[Timeline]) -> list[Sent]:
    """Put sends, receives and their waits into the timelines, one for each stage."""
    found = sorted(messages([timeline.work for timeline in timelines]), key=lambda message: message.made)
    channels: dict[tuple[int, int], list[Sent]] = {}
    for message in found:
        channels.setdefault((message.source, message.target), []).append(message)
    for (_, target), sent in channels.items():
        posted = None
        for message in reversed(sent):
            own = max(0, message.needed - AHEAD)
            posted = own if posted is None else min(posted, own)
            timelines[target].before[posted].insert(0, message.receive)
    for message in found:
        timelines[message.target].before[message.needed].append(wait_for(message.receive))
        timelines[message.source].after[message.made].append(message.send)
    for message in found:
        place = arrival(message, channels.get((message.target, message.source), ()))
        timeline = timelines[message.source]
        (timeline.after[-1] if place is None else timeline.before[place]).append(wait_for(message.send))
    return found


def arrival(message: Sent, answers: Iterable[Sent]) -> int | None:
    """The work of the source by which a message must have arrived: the first that needs something which the target made
    after it had received the message. To wait for the send there gives its memory back and takes no time."""
    return min((other.needed for other in answers if other.made >= message.needed), default=None)


def messages(stages: Sequence[Sequence[Work]]) -> Iterator[Sent]:
    """Every slot and every gradient that one stage needs of another."""
    makers: dict[tuple[str, int], dict[int, int]] = {}
    for stage, work in enumerate(stages):
        for k, item in enumerate(work):
            for slot in item.makes:
                makers.setdefault((slot, item.micro), {}).setdefault(stage, k)
    for stage, work in enumerate(stages):
        wanted: dict[tuple[str, int], int] = {}
        given: dict[tuple[str, int], int] = {}
        for k, item in enumerate(work):
            for slot in item.slots:
                wanted.setdefault((slot, item.micro), k)
            for slot in item.gives:
                given[slot, item.micro] = k
        for (slot, micro), k in wanted.items():
            makes = makers[slot, micro]
            if stage not in makes:
                source, made = next(iter(makes.items()))
                yield Sent(slot, micro, source, stage, made, k)
        for (slot, micro), k in given.items():
            if stage not in makers[slot, micro]:
                target = next(iter(makers[slot, micro]))
                yield Sent(f"d:{slot}", micro, stage, target, k, takes(stages[target], slot, micro))


def takes(work: Sequence[Work], slot: str, micro: int) -> int:
    """The work that takes the gradient of a slot: the backward of the call that makes it."""
    return next(
        k for k, item in enumerate(work)
        if item.micro == micro and item.op in ("backward", "backward_input") and slot in item.info.call.results
    )  # fmt: skip
