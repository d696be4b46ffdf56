"""Pictures of schedules."""

from xml.etree import ElementTree

import pytest

from compiler.analysis.time import Span, StageTime, StepTime
from compiler.report.pictures import schedule_picture, step_picture
from compiler.report.timeline import to_svg, to_text
from compiler.schedule.costs import StageCosts
from compiler.schedule.named import NAMED, make_schedule
from runtime.instructions import parse_instruction

FOLDED = """\
zb_v: 2 ranks, 4 stages, 2 micro-batches
rank 0  0F0 0F1 ····3F0 3I0
rank 1  ····1F0 2F0 1F1 2F1

rank 0  3W0 3F1 3I1 3W1 0B0─
rank 1  2I0 2W0 1I0 1W0 2I1

rank 0  ─── ····0B1────
rank 1  2W1 1I1 1W1 ····
makespan 14, bubble 16.7 %, at most 4 activations alive on a rank
"""


def test_long_times_are_folded():
    text = to_text(schedule_picture("zb_v", make_schedule("zb_v", 2, 2)), width=28).plain
    assert text == FOLDED


@pytest.mark.parametrize("name", [*NAMED, "auto"])
def test_every_action_is_in_the_picture(name):
    schedule = make_schedule(name, 3, 6)
    count = sum(map(len, schedule.actions))
    svg = ElementTree.fromstring(to_svg(schedule_picture(name, schedule)))
    assert len(svg.findall(".//{*}title")) == count


def test_lengths_are_those_of_the_costs():
    costs = StageCosts((1.0, 3.0), (1.0, 0.0), (1.0, 0.0), (1, 1))
    text = to_text(schedule_picture("1f1b", make_schedule("1f1b", 2, 1), costs)).plain
    assert "rank 0  F0 ·········B0───" in text and "rank 1  ···F0────── " in text


def step_of(*lines: tuple[str, float, float]) -> StepTime:
    spans = [Span(parse_instruction(text), start, end) for text, start, end in lines]
    return StepTime((StageTime(0, 5.0, 4.0, {}, 0.0, {}, spans),), 0)


def test_a_step_joins_the_calls_of_a_micro_batch():
    picture = step_picture(
        "tiny",
        step_of(
            ("gather bucket0", 0.0, 0.0), ("forward a @0", 0.0, 1.0), ("drop a/x @0", 1.0, 1.0), ("forward b @0", 1.0, 2.0),
            ("wait recv d:b/x @0 <1", 2.0, 3.0), ("backward b @0", 3.0, 4.0), ("step bucket0", 4.0, 5.0), ("report", 5.0, 5.0),
        ),
    )  # fmt: skip
    ((head, boxes),) = picture.rows
    assert head == "stage 0"
    assert [(box.label, box.title, box.start, box.end) for box in boxes] == [
        ("F0", "forward of a … b, micro-batch 0", 0.0, 2.0),
        ("B0", "backward of b, micro-batch 0", 3.0, 4.0),
        ("O", "optimizer of bucket0", 4.0, 5.0),
    ]
    assert "F0───" in to_text(picture).plain and "optimizer of bucket0" in to_svg(picture)


def test_a_pause_divides_boxes():
    picture = step_picture("tiny", step_of(("forward a @0", 0.0, 1.0), ("forward b @0", 2.0, 3.0)))
    assert [box.title for box in picture.rows[0][1]] == ["forward of a, micro-batch 0", "forward of b, micro-batch 0"]


def test_a_picture_of_waiting_is_bounded():
    costs = StageCosts((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1, 1), transfer=1e9)
    text = to_text(schedule_picture("1f1b", make_schedule("1f1b", 2, 2), costs), width=3_000).plain
    assert len(text) < 6_000
