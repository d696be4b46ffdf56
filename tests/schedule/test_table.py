"""Schedules in files: what is read, and what is said about mistakes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.diagnostics import Diagnostics, PlanError, render
from compiler.dsl import load
from compiler.schedule.named import NAMED, make_schedule
from compiler.schedule.planned import plan_schedule
from compiler.schedule.table import parse_table
from compiler.schedule.timing import simulate

PLAN = """
model "m:M"
input x : float32[8]
mesh pp=2
pipeline over pp { schedule = "own.csv", microbatches = 2 }
"""


def read(text: str, ranks: int = 2, microbatches: int = 2):
    diagnostics = Diagnostics()
    schedule = parse_table(text, "own.csv", ranks, microbatches, diagnostics)
    return schedule, [(d.span.line, d.span.column, d.message) for d in diagnostics]


@pytest.mark.parametrize("name", NAMED)
def test_every_named_schedule_can_be_written_and_read(name):
    schedule = make_schedule(name, 3, 7)
    assert read(str(schedule), 3, 7) == (schedule, [])


def test_blanks_comments_and_idle_cells():
    text = "# mine\n\n 0F0 , 0F1,,0B0,0B1  # the first\n1F0,1B0,1F1,1B1\n"
    assert read(text)[0] == read("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")[0] is not None


def test_the_format_of_torch():
    text = (
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0W0,0B1,0REDUCE_GRAD\n1RECV_F0,1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    )
    schedule, wrong = read(text)
    assert wrong == []
    assert str(schedule) == "0F0,0F1,0I0,0W0,0B1\n1F0,1F1,1B0,1B1\n"


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("0F0,0x1,0B0,0B1\n1f0,1F1,1B0,1B1", [(1, 5, "`0x1` is no action"), (2, 1, "`1f0` is no action")]),
        ("0F0,0F1,0B0,0B1", [(1, 1, "the schedule has 1 line, the pipeline 2 ranks")]),
        ("", [(1, 1, "the schedule has 0 lines, the pipeline 2 ranks")]),
        ("0F0,0B0\n1F0,1B0\n2F0,2B0", [(3, 1, "the schedule has 3 lines, the pipeline 2 ranks")]),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0", [(2, 1, "stage 1 has no backward of 1 of 2 micro-batches: 1B1")]),
        ("0F0,0B0\n1F0,1B0", [
            (1, 1, "stage 0 has no forward of 1 of 2 micro-batches: 0F1"),
            (1, 1, "stage 0 has no backward of 1 of 2 micro-batches: 0B1"),
            (2, 1, "stage 1 has no forward of 1 of 2 micro-batches: 1F1"),
            (2, 1, "stage 1 has no backward of 1 of 2 micro-batches: 1B1")]),
        ("0F0,0F1,0F2,0B0,0B1\n1F0,1F1,1B0,1B1", [(1, 9, "there is no micro-batch 2")]),
        ("0F0,0F1,0B0,0B1,1F0\n1F0,1F1,1B0,1B1", [(1, 17, "stage 1 is on rank 1, this is rank 0")]),
        ("0F0,0F1,0F0,0B0,0B1\n1F0,1F1,1B0,1B1", [(1, 9, "0F0 is done twice")]),
        ("0B0,0F0,0F1,0B1\n1F0,1F1,1B0,1B1", [(1, 1, "0B0 comes before the forward 0F0")]),
        ("0F0,0F1,0W0,0I0,0B1\n1F0,1F1,1B0,1B1", [(1, 9, "0W0 comes before its input part 0I0")]),
        ("0F0,0F1,0I0,0B0,0W0,0B1\n1F0,1F1,1B0,1B1", [(1, 13, "0B0 repeats the backward that 0I0 has done")]),
        ("0F0,0F1,0I0,0B1\n1F0,1F1,1B0,1B1", [(1, 1, "stage 0 has no weight-gradient part of 1 of 2 micro-batches: 0W0")]),
        ("0F0,0F1,0B0,0B1\n2F0,2F1,2B0,2B1", [(2, 1, "no rank has stage 1")]),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1,999999999F0", [(2, 17, "no rank has stage 2")]),
        (",\n,", [(1, 1, "no rank has stage 0")]),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", [(1, 5,
            "the ranks would wait for ever: rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1 of rank 0")]),
    ],
)  # fmt: skip
def test_mistakes(text, wrong):
    schedule, found = read(text)
    assert found == wrong
    assert schedule is None


@settings(max_examples=300, deadline=None)
@given(st.text("0123FBIWfx,;()#\n \x00é", max_size=60), st.integers(1, 3), st.integers(1, 3))
def test_any_text_is_read_or_refused(text, ranks, microbatches):
    schedule, wrong = read(text, ranks, microbatches)
    assert (schedule is None) == bool(wrong)
    if schedule is not None:
        simulate(schedule)


def test_a_plan_with_a_file(tmp_path):
    (tmp_path / "p.plan").write_text(PLAN)
    (tmp_path / "own.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    schedule = plan_schedule(load(tmp_path / "p.plan"))
    assert str(schedule) == (tmp_path / "own.csv").read_text()


def test_the_message_shows_the_cell(tmp_path):
    (tmp_path / "p.plan").write_text(PLAN)
    (tmp_path / "own.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B2\n")
    with pytest.raises(PlanError) as caught:
        plan_schedule(load(tmp_path / "p.plan"))
    text = render(caught.value.diagnostics, caught.value.sources)
    assert "own.csv:2:13" in text
    assert "2 | 1F0,1B0,1F1,1B2\n  |             ^^^" in text
    assert "they are numbered from 0 to 1" in text


def test_a_missing_file(tmp_path):
    (tmp_path / "p.plan").write_text(PLAN)
    (tmp_path / "owm.csv").touch()
    with pytest.raises(PlanError, match="there is no schedule file") as caught:
        plan_schedule(load(tmp_path / "p.plan"))
    assert caught.value.diagnostics[0].help == ("in that folder: `owm.csv`",)


def test_virtual_must_agree_with_the_file(tmp_path):
    (tmp_path / "p.plan").write_text(PLAN)
    (tmp_path / "own.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    with pytest.raises(PlanError, match="the schedule has 2 stages, not 2 on each of 2 ranks"):
        plan_schedule(load(tmp_path / "p.plan", ["pipeline.virtual=2"]))


def test_a_named_schedule_that_the_plan_cannot_have(tmp_path):
    (tmp_path / "p.plan").write_text(PLAN.replace('"own.csv"', "dualpipe_v"))
    with pytest.raises(PlanError, match="at least 4 micro-batches, not 2") as caught:
        plan_schedule(load(tmp_path / "p.plan"))
    assert caught.value.diagnostics[0].span.line == 5
