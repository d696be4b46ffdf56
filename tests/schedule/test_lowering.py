"""Random models on random schedules: the streams that they are lowered to are sound."""

from __future__ import annotations

import dataclasses
import random

import pytest

from compiler.analysis.stream_rules import Code, Part
from compiler.analysis.streams import stream_faults
from compiler.schedule.actions import Pipeline, ScheduleError
from compiler.schedule.named import NAMED, make_schedule
from compiler.schedule.pipeline import pipeline_work
from compiler.schedule.stream import StreamRequest, streams
from compiler.schedule.work import CallInfo
from runtime.loss_scale import LossScaling
from runtime.program import Bucket, Call, Message, Output, Parameter, Program
from tests.analysis.test_streams import program

ANY = ("float64", (1,))


def random_calls(draw: random.Random, count: int) -> list[CallInfo]:
    """A chain of calls with skips; some read a shared parameter, a first one may have nothing to learn."""
    frozen = draw.random() < 0.3
    infos = []
    for k in range(count):
        skips = [j for j in range(k - 1) if draw.random() < 0.2]
        learns = k > 0 or not frozen
        parameters = [f"w{k}", *(["shared"] if draw.random() < 0.3 else [])] if learns else []
        slots = [f"x{j}" for j in (*skips, k - 1) if j >= 0]
        arguments = (*slots, *(f"param:{name}" for name in parameters))
        gradients = [ref for ref in arguments if ref != "x0" or not frozen]
        call = Call(f"c{k}", f"c{k}", arguments, ("loss" if k == count - 1 else f"x{k}",), tuple(gradients))
        needed = tuple(j for j in range(len(arguments)) if draw.random() < 0.7)
        late = tuple(j for j, ref in enumerate(arguments) if ref.startswith("param:") and draw.random() < 0.8)
        again = tuple(j for j in late if draw.random() < 0.3) if late else None
        infos.append(CallInfo(call, needed, bool(gradients), late, again))
    return infos


def code_of(info: CallInfo) -> Code:
    index = info.call.arguments.index
    wanted = tuple(index(ref) for ref in info.call.gradients)
    early = tuple(k for k in wanted if k not in info.weight_wanted)
    return Code(
        (0,),
        {
            "backward": Part(info.needed, wanted),
            "backward_input": Part(info.needed, early),
            "backward_weight": Part(info.weight_needed or (), info.weight_wanted),
        },
    )


def random_schedule(draw: random.Random) -> Pipeline:
    while True:
        name = draw.choice([*NAMED, "auto"])
        virtual = draw.choice((2, 3)) if name == "interleaved" else None
        try:
            return make_schedule(name, draw.randint(2, 4), draw.randint(1, 6), virtual)
        except ScheduleError:
            continue  # too few micro-batches for it


def lowered(draw: random.Random) -> tuple[Program, dict[str, Code]]:
    schedule = random_schedule(draw)
    infos = random_calls(draw, schedule.stages + draw.randint(0, 4))
    cuts = sorted(draw.sample(range(1, len(infos)), schedule.stages - 1))
    stage_of = {info.call.name: sum(cut <= k for cut in cuts) for k, info in enumerate(infos)}
    ranks = {name: schedule.rank_of[stage] for name, stage in stage_of.items()}
    infos = [
        dataclasses.replace(info, call=dataclasses.replace(info.call, stages=(ranks[info.call.name],)))
        for info in infos
    ]
    holders: dict[str, set[int]] = {}
    for info in infos:
        for name in info.trained:
            holders.setdefault(name, set()).add(ranks[info.call.name])
    zero, groups = draw.choice((0, 0, 1, 2, 3)), {}
    for name, where in holders.items():
        groups.setdefault((tuple(sorted(where)), draw.randint(0, 1)), []).append(name)
    shard = draw.choice((("dp",), ("dp", "cp"))) if zero else ()
    buckets = tuple(
        Bucket(
            f"b{k}", "float64", ("pp", "dp", "cp") if len(stages) > 1 else ("dp", "cp"), tuple(names), 0, len(names),
            shard if len(stages) == 1 else (), zero if len(stages) == 1 else 0, stages=stages,
        )
        for k, ((stages, _), names) in enumerate(groups.items())
    )  # fmt: skip
    clip, scaled = draw.random() < 0.5, draw.random() < 0.3
    work = pipeline_work(schedule, infos, {name: (stage,) for name, stage in stage_of.items()})
    requests = [
        StreamRequest(
            [b for b in buckets if rank in b.stages], clip=clip, finite=scaled, kept=("loss",), prefetch=draw.randint(0, 2),
            gather_once=draw.random() < 0.3, scatter=draw.random() < 0.7,
        )
        for rank in range(schedule.ranks)
    ]  # fmt: skip
    instructions = streams(work, requests)
    sent = {item.target for stream in instructions for item in stream if item.op == "send"}
    of = program(
        mesh={"pp": schedule.ranks, "dp": 2, "cp": 2}, microbatches=schedule.microbatches, buckets=buckets,
        calls=tuple(info.call for info in infos), clip={"grad_norm": 1.0} if clip else None,
        parameters=tuple(Parameter(name, (1,), "float64", True, stages=tuple(sorted(w))) for name, w in holders.items()),
        outputs=(Output("loss", "loss", ("pp", "dp"), stage=schedule.rank_of[-1]),),
        messages=tuple(Message(name, *ANY) for name in sorted(sent)),
    )  # fmt: skip
    of = dataclasses.replace(of, loss_scale=LossScaling(1.0) if scaled else None)
    return dataclasses.replace(of, streams=instructions), {info.call.kind: code_of(info) for info in infos}


@pytest.mark.parametrize("seed", range(40))
def test_streams_are_sound(seed):
    draw = random.Random(seed)
    for _ in range(5):
        of, codes = lowered(draw)
        found = stream_faults(of, codes)
        assert not found, "\n".join(map(str, found[:3]))


def test_a_send_is_waited_for_where_its_answer_arrives():
    """The gradient of what was sent, or what was made with it, comes back: by then the message has arrived."""
    schedule = make_schedule("1f1b", 2, 6)
    first = Call("a", "a", ("batch:i", "param:w"), ("x",), ("param:w",), stages=(0,))
    last = Call("b", "b", ("x",), ("loss",), ("x",), stages=(1,))
    infos = [CallInfo(first, (0,), True), CallInfo(last, (0,), True)]
    requests = [StreamRequest((), kept=("loss",)) for _ in range(2)]
    zero, one = streams(pipeline_work(schedule, infos, {"a": (0,), "b": (1,)}), requests)
    text = "\n".join(map(str, zero))
    assert "wait recv d:x @0 <1\nwait send x @0 >1\nbackward a @0" in text
    under_way = most = 0
    for item in one:
        under_way += (item.op == "send") - (item.op == "wait" and item.targets[0] == "send")
        most = max(most, under_way)
    assert most <= 2
