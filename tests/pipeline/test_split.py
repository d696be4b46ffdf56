"""Stages: balanced by what calls cost, equal by layers, or as the plan says; and what passes between them."""

from __future__ import annotations

import itertools
import math

import pytest

from compiler.diagnostics import PlanError
from compiler.dsl import loads as parse
from compiler.ir.graph import Value
from compiler.layout.placement import Layout, Mesh, V
from compiler.pipeline.fits import memory_warnings
from compiler.pipeline.loads import Runs
from compiler.pipeline.split import Crossing, Stage, crossings
from compiler.pipeline.state import state_bytes
from compiler.report.stages import stage_rows, stage_table
from compiler.schedule.named import make_schedule
from compiler.schedule.timing import simulate
from tests.pipeline.plans import Case, case
from tests.zoo import get, plan_text

GPU = "cluster { device = h100 }"


def names(case: Case) -> list[tuple[str, str]]:
    return [(stage.calls[0], stage.calls[-1]) for stage in case.assigned().stages]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["llama-odd-tiny", "encdec-tiny", "c01_tied_pp", "c09_encdec", "vit-tiny"])
def test_balance(name: str, stages: int) -> None:
    """No cut has a faster slowest stage."""
    it = case(name, stages, "microbatches = 4", GPU)
    assignment = it.assigned()
    placed = [load for load in it.loads if load.name not in assignment.replicated]
    assert [name for stage in assignment.stages for name in stage.calls] == [load.name for load in placed]
    copies = {load.name: load for load in it.loads if load.name in assignment.replicated}
    runs = Runs(placed, copies, it.state)
    best = min(
        max(runs(first, end).seconds for first, end in zip((0, *cut), (*cut, len(placed))))
        for cut in itertools.combinations(range(1, len(placed)), stages - 1)
    )
    assert max(stage.run.seconds for stage in assignment.stages) == pytest.approx(best, rel=1e-9)


def test_a_run_costs_what_its_calls_do() -> None:
    it = case("llama-tiny", 2)
    run = Runs(it.loads, {}, it.state)(0, len(it.loads))
    costs = [load.cost for load in it.loads]
    assert run.flops == sum(c.forward.flops + c.input.flops + c.weight.flops for c in costs)
    assert run.state == sum(it.state.values()) and run.received == run.returned == 0
    parameters = it.compilation.program.parameters
    assert run.state == sum(4 * 4 * math.prod(p.shape) for p in parameters)  # weight, gradient and two moments


def test_tied_weights_are_held_by_both_stages() -> None:
    it = case("c01_tied_pp", 2)
    first, last = it.assigned().stages
    assert first.run.parameters & last.run.parameters == {"table.weight"}
    assert first.run.state + last.run.state == sum(it.state.values()) + it.state["table.weight"]


def test_values_that_skip_stages_go_straight_to_their_readers() -> None:
    """Every decoder layer reads what the last encoder layer made."""
    it = case("encdec-tiny", 4, 'split before "encoder.1", "decoder.0", "decoder.1"')
    passed = [
        (crossing.producer, crossing.consumers, crossing.gradients) for crossing in crossings(it.assigned(), it.loads)
    ]
    assert passed == [(0, (1,), (1,)), (1, (2, 3), (2, 3)), (1, (2,), (2,)), (2, (3,), (3,))]


def test_constants_are_computed_where_they_are_needed() -> None:
    """The mask of padded sources, and the rotary tables."""
    assignment = case("encdec-tiny", 4, 'split before "encoder.1", "decoder.0", "decoder.1"').assigned()
    assert assignment.replicated == {"begin.constants": (0, 1, 2, 3)}
    assert "begin.constants" not in assignment.stage_of
    assert case("llama-tiny", 2, 'split before "layers.0"').assigned().replicated == {"begin.constants": (1,)}


def test_constants_that_are_slower_to_compute_than_to_send_are_sent() -> None:
    fast = 'cluster { device = cpu, bandwidth = 1MB/s, intra = "fast 900GB/s 1us" }'
    it = case("encdec-tiny", 2, 'split before "decoder.0"', fast)
    assignment = it.assigned()
    assert assignment.replicated == {} and assignment.stage_of["begin.constants"] == 0
    assert [c.gradients for c in crossings(assignment, it.loads) if "constants" in c.slot] == [()]


def test_crossings_of_a_chain() -> None:
    it = case("llama-tiny", 2, 'split before "layers.1"')
    (crossing,) = crossings(it.assigned(), it.loads)
    (slot,) = next(load.call.results for load in it.loads if load.name == "layers.0")
    assert crossing == Crossing(slot, 0, (1,), (1,))


def test_memory_decides_where_time_alone_would_not() -> None:
    """1F1B keeps four micro-batches alive on the first of four stages: with less memory it gets less to do."""
    roomy = case("llama-small", 3, "microbatches = 8", "cluster { device = h100 }")
    need = [needs(stage) for stage in roomy.assigned().stages]
    tight = case("llama-small", 3, "microbatches = 8", f"cluster {{ device = h100, memory = {max(need) - 1}B }}")
    assert max(needs(stage) for stage in tight.assigned().stages) < max(need)


def needs(stage: Stage) -> int:
    return stage.run.state + stage.in_flight * stage.run.activation + stage.run.transient


def test_equal_numbers_of_layers() -> None:
    assert names(case("c01_tied_pp", 4, "split = equal")) == [
        ("begin", "blocks.0"), ("blocks.1", "blocks.1"), ("blocks.2", "blocks.2"), ("blocks.3", "end")
    ]  # fmt: skip
    assert names(case("llama-odd-tiny", 2, "split = equal")) == [("begin", "layers.1"), ("layers.2", "end")]
    with pytest.raises(PlanError, match="3 stages of equal numbers of layers, but there are 2 layers"):
        case("llama-tiny", 3, "split = equal").assigned()


def test_split_points() -> None:
    it = case("llama-odd-tiny", 3, 'split before "layers.1", "head"')
    assert names(it) == [("begin", "layers.0"), ("layers.1", "between"), ("head", "end")]
    assert names(case("llama-odd-tiny", 3, 'split before "layers.[12]"'))[1] == ("layers.1", "layers.1")


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
        case("llama-odd-tiny", 2, f"split before {points}").assigned()
    assert caught.value.diagnostics[0].code == code and message in str(caught.value)
    assert caught.value.diagnostics[0].span is not None


def test_more_stages_than_segments() -> None:
    with pytest.raises(PlanError, match="9 pipeline stages, but the model has only"):
        case("llama-tiny", 9).assigned()


def test_a_warning_where_memory_does_not_suffice() -> None:
    it = case("llama-tiny", 2, "microbatches = 4", "cluster { device = h100, memory = 10kB }")
    (warning,) = memory_warnings(it.plan, it.assigned(), it.schedule, it.machine)
    assert warning.code == "W230" and "its device has 10kB" in warning.message
    roomy = case("llama-tiny", 2, "microbatches = 4", GPU)
    assert not [*memory_warnings(roomy.plan, roomy.assigned(), roomy.schedule, roomy.machine)]


def test_schedules_can_be_found_for_the_stages() -> None:
    """`schedule = auto` reads what the stages cost."""
    it = case("c01_tied_pp", 3, "microbatches = 6", GPU)
    assignment = it.assigned()
    costs = assignment.costs(it.schedule, it.machine, ("pp",), it.machine.device.memory)
    assert costs.limit == it.machine.device.memory - max(assignment.resident(it.schedule))
    found = make_schedule("auto", 3, 6, costs=costs)
    assert simulate(found, costs).makespan <= simulate(it.schedule, costs).makespan


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
    assert state_bytes(plan, value, Mesh((("dp", 4),)), trained=True) == 32 * 16 * each
    assert state_bytes(plan, value, Mesh((("dp", 4),)), trained=False) <= 32 * 16 * 4


def test_the_table() -> None:
    it = case("c01_tied_pp", 2, "microbatches = 4", GPU)
    sizes = {p.name: math.prod(p.shape) for p in it.compilation.program.parameters}
    first, last = stage_rows(it.assigned(), it.schedule, sizes)
    assert (first.first, last.last, first.in_flight, last.in_flight) == ("begin", "end", 2, 1)
    assert first.parameters + last.parameters == sum(sizes.values()) + sizes["table.weight"]
    assert stage_table([first, last]).row_count == 2
