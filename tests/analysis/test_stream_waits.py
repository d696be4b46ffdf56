"""The graph of waits against running the streams: a circle is found exactly where they would hang."""

from __future__ import annotations

import dataclasses
import random

import pytest
from tests.analysis.test_streams import program

from compiler.analysis.stream_waits import verify_waits
from runtime.instructions import Instruction, wait_for
from runtime.program import Bucket, Program


def random_streams(draw: random.Random) -> Program:
    """Messages between random stages and reductions over some, with waits anywhere behind their starts."""
    stages = draw.randint(2, 4)
    started: list[list[Instruction]] = [[] for _ in range(stages)]
    buckets = []
    for k in range(draw.randint(1, 6)):
        if draw.random() < 0.3:
            members = tuple(sorted(draw.sample(range(stages), draw.randint(2, stages))))
            buckets.append(Bucket(f"b{k}", "float64", ("pp",), (), 0, 1, stages=members))
            for member in members:
                started[member].append(Instruction("reduce", (f"b{k}",)))
        else:
            source, target = draw.sample(range(stages), 2)
            started[source].append(Instruction("send", ("x",), k, target))
            started[target].append(Instruction("recv", ("x",), k, source))
    streams = []
    for items in started:
        stream = list(items)
        if draw.random() < 0.3:
            draw.shuffle(stream)
        for item in items:
            at = stream.index(item) + 1
            stream.insert(draw.randint(at, min(len(stream), at + draw.randint(0, 4))), wait_for(item))
        streams.append(tuple(stream))
    plain = program(mesh={"pp": stages}, buckets=tuple(buckets), clip=None, outputs=())
    return dataclasses.replace(plain, streams=tuple(streams))


def hangs(of: Program) -> bool:
    """Run the streams; an event happens as soon as it can."""
    members = {bucket.name: bucket.stages for bucket in of.buckets}
    position = [0] * of.stages
    channels: dict[object, list[set[tuple[int, Instruction]]]] = {}  # what has been started, in order of each member
    where: dict[tuple[int, Instruction], tuple[object, int]] = {}
    count: dict[tuple[int, object], int] = {}

    def start(stage: int, item: Instruction) -> None:
        if item.op == "reduce":
            channel: object = members[item.target]
        else:
            channel = (stage, item.peer, "") if item.op == "send" else (item.peer, stage, "")
        number = count.get((stage, channel), 0)
        count[stage, channel] = number + 1
        places = channels.setdefault(channel, [])
        while len(places) <= number:
            places.append(set())
        places[number].add((stage, item))
        where[stage, item] = (channel, number)

    def complete(stage: int, item: Instruction) -> bool:
        channel, number = where[stage, item]
        parties = 2 if item.op != "reduce" else len(members[item.target])
        return all(len(place) == parties for place in channels[channel][: number + 1])

    moved = True
    while moved:
        moved = False
        for stage, stream in enumerate(of.streams):
            while position[stage] < len(stream):
                item = stream[position[stage]]
                if item.op == "wait":
                    if not complete(stage, item.waited):
                        break
                else:
                    start(stage, item)
                position[stage] += 1
                moved = True
    return any(at < len(stream) for at, stream in zip(position, of.streams))


@pytest.mark.parametrize("seed", range(20))
def test_a_circle_is_what_hangs(seed):
    draw = random.Random(seed)
    seen = {True: 0, False: 0}
    for _ in range(100):
        of = random_streams(draw)
        found = [str(fault) for fault in verify_waits(of)]
        if any("at this place" in fault or "does not" in fault for fault in found):
            continue  # the order differs: refused, whether it hangs or not
        circle = any("would wait for ever" in fault for fault in found)
        assert circle == hangs(of), "\n\n".join("\n".join(map(str, stream)) for stream in of.streams)
        seen[circle] += 1
    assert min(seen.values()) > 3
