"""Stages: balanced by what calls cost, equal by layers, or as the plan says; and what passes between them."""

from __future__ import annotations

import itertools
import math

import pytest

from compiler.analysis.machine import machine
from compiler.diagnostics import PlanError
from compiler.driver import Compilation
from compiler.dsl import loads as parse
from compiler.ir.graph import Value
from compiler.layout.placement import Layout, Mesh, V
from compiler.pipeline.loads import Runs
from compiler.pipeline.split import Stage
from compiler.pipeline.state import state_bytes
from compiler.precision import Precision
from compiler.report.stages import stage_rows, stage_table
from compiler.schedule.named import make_schedule
from compiler.schedule.timing import simulate
from tests.pipeline.plans import GPU, assignment, compiled, placed, schedule
from tests.zoo import get, plan_text


def ends(c: Compilation) -> list[tuple[str, str]]:
    """The first and the last call of each stage."""
    return [(stage.calls[0], stage.calls[-1]) for stage in assignment(c).stages]


def messages(c: Compilation) -> set[str]:
    """What is sent for micro-batch 0: "slot source>target"."""
    return {
        f"{item.target} {stage}>{item.peer}"
        for stage, stream in enumerate(c.program.streams)
        for item in stream
        if item.op == "send" and item.micro == 0
    }


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", ["llama-odd-tiny", "encdec-tiny", "c01_tied_pp"])
def test_balance(name: str, stages: int) -> None:
    """No cut has a faster slowest stage."""
    c = compiled(name, stages, "microbatches = 4", GPU)
    calls, copies = placed(c)
    assert [name for stage in assignment(c).stages for name in stage.calls] == [load.name for load in calls]
    runs = Runs(calls, copies, {parameter.name: 0 for parameter in c.program.parameters})
    best = min(
        max(runs(first, end).seconds for first, end in zip((0, *cut), (*cut, len(calls))))
        for cut in itertools.combinations(range(1, len(calls)), stages - 1)
    )
    assert max(stage.run.seconds for stage in assignment(c).stages) == pytest.approx(best, rel=1e-9)


def test_a_run_costs_what_its_calls_do() -> None:
    c = compiled("llama-tiny", 2)
    calls, _ = placed(c)
    state = {p.name: 4 * 4 * math.prod(p.shape) for p in c.program.parameters}  # weight, gradient and two moments
    found = [stage.run for stage in assignment(c).stages]
    assert sum(run.state for run in found) == sum(state.values())
    assert sum(run.flops for run in found) == sum(
        load.cost.forward.flops + load.cost.input.flops + load.cost.weight.flops for load in calls
    )
    last = Runs(calls, {}, state)(len(calls) - 1, len(calls))
    assert last.received == last.returned == 8 * 8 * 16 * 4  # the activation, and its gradient


def test_tied_weights_are_held_by_both_stages() -> None:
    c = compiled("c01_tied_pp", 2)
    first, last = assignment(c).stages
    assert first.run.parameters & last.run.parameters == {"table.weight"}
    table = next(p for p in c.program.parameters if p.name == "table.weight")
    total = sum(math.prod(p.shape) for p in c.program.parameters)
    assert first.run.state + last.run.state == 16 * (total + math.prod(table.shape))


def test_values_that_skip_stages_go_straight_to_their_readers() -> None:
    """Every decoder layer reads what the encoder made, and gives a gradient for it."""
    c = compiled("encdec-tiny", 4, 'split before "encoder.1", "decoder.0", "decoder.1"')
    memory = next(r for call in c.program.calls if call.name == "between" for r in call.results if "layer_norm" in r)
    sent = {message for message in messages(c) if memory in message}
    assert sent == {f"{memory} 1>2", f"{memory} 1>3", f"d:{memory} 2>1", f"d:{memory} 3>1"}


def test_constants_are_computed_where_they_are_needed() -> None:
    """The mask of padded sources, and the rotary tables."""
    c = compiled("encdec-tiny", 4, 'split before "encoder.1", "decoder.0", "decoder.1"')
    assert assignment(c).replicated == {"begin.constants": (0, 1, 2, 3)}
    assert not [message for message in messages(c) if "constants" in message]
    c = compiled("llama-tiny", 2, 'split before "layers.0"')
    assert assignment(c).replicated == {"begin.constants": (1,)}


def test_constants_that_are_slower_to_compute_than_to_send_are_sent() -> None:
    fast = 'cluster { device = cpu, bandwidth = 1MB/s, intra = "fast 900GB/s 1us" }'
    c = compiled("encdec-tiny", 2, 'split before "decoder.0"', fast)
    assert assignment(c).replicated == {} and assignment(c).stage_of["begin.constants"] == 0
    assert [message.split()[1] for message in messages(c) if "constants" in message] == ["0>1"]


def test_memory_decides_where_time_alone_would_not() -> None:
    """1F1B keeps three micro-batches alive on the first of three stages: with less memory it gets less to do."""
    roomy = [needs(stage) for stage in assignment(compiled("llama-small", 3, "microbatches = 8", GPU)).stages]
    tight = f"cluster {{ device = h100, memory = {max(roomy) - 1}B }}"
    assert max(map(needs, assignment(compiled("llama-small", 3, "microbatches = 8", tight)).stages)) < max(roomy)


def needs(stage: Stage) -> int:
    return stage.run.state + stage.in_flight * stage.run.activation + stage.run.transient


def test_a_warning_where_memory_does_not_suffice() -> None:
    (warning,) = compiled("llama-tiny", 2, "microbatches = 4", "cluster { device = h100, memory = 10kB }").warnings
    assert warning.code == "W230" and "its device has 10kB" in warning.message
    assert not compiled("llama-tiny", 2, "microbatches = 4", GPU).warnings


def test_equal_numbers_of_layers() -> None:
    assert ends(compiled("c01_tied_pp", 4, "split = equal")) == [
        ("begin", "blocks.0"), ("blocks.1", "blocks.1"), ("blocks.2", "blocks.2"), ("blocks.3", "end")
    ]  # fmt: skip
    assert ends(compiled("llama-odd-tiny", 2, "split = equal")) == [("begin", "layers.1"), ("layers.2", "end")]
    with pytest.raises(PlanError, match="3 stages of equal numbers of layers, but there are 2 layers"):
        compiled("llama-tiny", 3, "split = equal")


def test_split_points() -> None:
    """A module that is named becomes a segment."""
    c = compiled("llama-odd-tiny", 3, 'split before "layers.1", "head"')
    assert ends(c) == [("begin", "layers.0"), ("layers.1", "between"), ("head", "end")]
    assert ends(compiled("llama-odd-tiny", 3, 'split before "layers.[12]"'))[1] == ("layers.1", "layers.1")


@pytest.mark.parametrize(
    ("points", "code", "message"),
    [
        ('"layers.7"', "E230", "did you mean `layers.2`"),
        ('"layers.1.mlp"', "E230", "in the middle of segment `layers.1`"),
        ('"layers.[12]"', "E231", "make 3 stages, the pipeline has 2"),
        ('"embed*"', "E231", "make 1 stages"),
    ],
)
def test_wrong_split_points(points: str, code: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        compiled("llama-odd-tiny", 2, f"split before {points}")
    assert caught.value.diagnostics[0].code == code and message in str(caught.value)
    assert caught.value.diagnostics[0].span is not None


def test_more_stages_than_segments() -> None:
    with pytest.raises(PlanError, match="9 pipeline stages, but the model has only"):
        compiled("llama-tiny", 9)


def test_schedules_can_be_found_for_the_stages() -> None:
    """`schedule = auto` reads what the stages cost."""
    c = compiled("c01_tied_pp", 3, "microbatches = 6", GPU)
    there = machine(c.plan, c.mesh)
    costs = assignment(c).costs(schedule(c), there, ("pp",), there.device.memory)
    assert costs.limit == there.device.memory - max(assignment(c).resident(schedule(c)))
    assert simulate(make_schedule("auto", 3, 6, costs=costs), costs).makespan <= simulate(schedule(c), costs).makespan


@pytest.mark.parametrize(
    ("extra", "each"),
    [
        ("", 16),  # weight, gradient, two moments
        ("zero over dp { stage = 1 }", 8 + 8 / 4),
        ("zero over dp { stage = 2 }", 4 + 12 / 4),
        ("zero over dp { stage = 3 }", 16 / 4),
        ("precision { compute = bf16 }", 2 + 4 + 4 + 8),
        ("precision { compute = bf16, reduce = bf16, master = bf16 }", 8),
    ],
)
def test_bytes_of_a_parameter(extra: str, each: float) -> None:
    plan = parse(plan_text(get("llama-tiny"), mesh="dp=4", extra=extra), "x.plan")
    value = Value("w", "float32", (32, 16), "param", layout=Layout({"dp": V}))
    stored, mesh = Precision.of(plan).stored("float32"), Mesh((("dp", 4),))
    assert state_bytes(plan, value, stored, mesh, trained=True) == 32 * 16 * each
    assert state_bytes(plan, value, stored, mesh, trained=False) <= 32 * 16 * 4


def test_the_table() -> None:
    c = compiled("c01_tied_pp", 2, "microbatches = 4, split = auto, schedule = 1f1b", GPU)
    sizes = {p.name: math.prod(p.shape) for p in c.program.parameters}
    first, last = stage_rows(c)
    assert (first.first, last.last, first.in_flight, last.in_flight) == ("begin", "end", 2, 1)
    assert first.parameters + last.parameters == sum(sizes.values()) + sizes["table.weight"]
    assert stage_table([first, last]).row_count == 2
    asked = {item.request: item for item in c.asked}
    assert all(asked[f"{key}"].outcome == "applied" for key in ("pipeline over pp", "split = auto", "schedule = 1f1b"))
    assert "2 stages on 2 ranks" in asked["pipeline over pp"].detail
