"""The time reader on streams and machines whose answer is known."""

from __future__ import annotations

import json
import math

import pytest

from compiler.analysis.dry_run import DryRun, Step
from compiler.analysis.estimate import estimate
from compiler.analysis.events import Communicate, Compute, Event, Wait
from compiler.analysis.machine import Machine
from compiler.analysis.time import StepTime, read_time
from compiler.cli import main
from compiler.driver import compile
from compiler.dsl import loads
from compiler.dsl.devices import Device
from compiler.dsl.strings import Link
from compiler.layout.placement import Mesh
from runtime.instructions import parse_instruction
from tests.analysis.plans import plan_of
from tests.zoo import get, plan_text

SECOND = 1000  # floating-point operations, or bytes on a link


def machine(mesh: str) -> Machine:
    """Devices that do 1000 operations a second, on links of 1000 bytes a second without latency."""
    axes = tuple((name, int(size)) for name, size in (item.split("=") for item in mesh.split()))
    link = Link("", SECOND, 0.0)
    return Machine(Device("toy", 10**9, 1e12, {"float32": SECOND}), Mesh(axes), 10**6, link, link)


def work(seconds: float) -> Compute:
    return Compute("aten.mm.default", int(seconds * SECOND), 0, "float32", 0)


def gather(number: int, seconds: float, asynchronous: bool = True) -> Communicate:
    """An all-gather among two, so half of the bytes are sent."""
    return Communicate(number, "all_gather", (0, 1), ("dp",), int(2 * seconds * SECOND), 0, asynchronous, (), 0)


def message(kind: str, number: int, source: int, target: int) -> Communicate:
    return Communicate(number, kind, (source, target), ("pp",), 0, 0, True, (), 0)


def played(mesh: str, *ranks: list[tuple[str, list[Event]]]) -> StepTime:
    runs = [
        DryRun(stage, stage, [Step(parse_instruction(text), {}, [events]) for text, events in steps], {}, {})
        for stage, steps in enumerate(ranks)
    ]
    return read_time(runs, machine(mesh), 0)


def test_operators_add_up():
    assert played("dp=2", [("forward a @0", [work(1), work(2)]), ("forward b @0", [work(3)])]).seconds == 6


@pytest.mark.parametrize(("between", "exposed"), [(0, 2), (1, 1), (5, 0)])
def test_overlap(between: int, exposed: int):
    """A communication of 2 seconds behind some work: what the work leaves of it is exposed."""
    time = played("dp=2", [("forward a @0", [gather(0, 2), work(between), Wait(0)])])
    assert time.seconds == max(2, between)
    assert time.stages[0].exposed.get(("dp",), 0) == exposed


def test_one_stream_for_each_communicator():
    """Two gathers over the same axis are one after the other."""
    time = played("dp=2", [("forward a @0", [gather(0, 2), gather(1, 3), Wait(1), Wait(0)])])
    assert time.seconds == 5


def test_waiting_at_once():
    assert played("dp=2", [("forward a @0", [gather(0, 2, asynchronous=False), work(1)])]).seconds == 3


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 4), (4, 4), (4, 8)])
def test_bubble(stages: int, microbatches: int):
    """All forwards, then all backwards, of equal stages: (p - 1) / m of the ideal time."""
    ranks = []
    for stage in range(stages):
        steps: list[tuple[str, list[Event]]] = []
        for op, step in (("forward", 1), ("backward", -1)):
            for micro in range(microbatches):
                events: list[Event] = []
                number = 10 * micro + (op == "backward") * 1000
                if 0 <= stage - step < stages:
                    events += [message("recv", number, stage - step, stage), Wait(number)]
                events.append(work(1 if op == "forward" else 2))
                if 0 <= stage + step < stages:
                    events.append(message("send", number + 1, stage, stage + step))
                steps.append((f"{op} a @{micro}", events))
        ranks.append(steps)
    time = played(f"pp={stages}", *ranks)
    assert time.seconds == 3 * (microbatches + stages - 1)
    assert time.bubble == pytest.approx((stages - 1) / microbatches)


def test_model_flops():
    """6 for each weight of a matrix and each token, and 12 · layers · length · width for (causal: half) attention."""
    entry = get("llama-small")
    compilation = compile(loads(plan_text(entry, 8, "dp=2")))
    matrices = sum(
        math.prod(p.shape) for p in compilation.program.parameters if len(p.shape) == 2 and p.name != "embed.weight"
    )
    tokens, seq, width = 8 * 32, 32, 64
    attention = 12 * 4 * seq * width * tokens // 2
    assert estimate(compilation).time.model_flops == 6 * matrices * tokens + attention


def test_recomputation_costs_no_mfu():
    """Recomputed operations are executed, but they are not the model's."""
    plain, full = (estimate(compile(plan_of(name))).time for name in ("accumulate", "full"))
    assert full.model_flops == plain.model_flops
    assert sum(full.stages[0].flops.values()) > sum(plain.stages[0].flops.values())


def test_command(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """`planc estimate --json`: the same figures, and whether they fit the device."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.plan").write_text(plan_of("zero-3").text + "cluster { device = h100, memory = 1MB }\n")
    assert main(["estimate", "x.plan", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (memory,) = found["memory"]
    assert memory["peak"] == sum(memory["categories"].values()) > found["device_memory"] and not found["fits"]
    assert sum(flow["sent"] for flow in found["traffic"][0]["flows"]) == found["traffic"][0]["sent"]
    assert 0 < found["mfu"] < 1 and found["tokens_per_second"] == pytest.approx(8 * 32 / found["step_seconds"])
