"""Pictures of schedules."""

from xml.etree import ElementTree

import pytest

from compiler.report.timeline import draw, to_svg, to_text
from compiler.schedule.costs import StageCosts
from compiler.schedule.named import NAMED, make_schedule

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
    text = to_text(draw("zb_v", make_schedule("zb_v", 2, 2)), width=28).plain
    assert text == FOLDED


@pytest.mark.parametrize("name", [*NAMED, "auto"])
def test_every_action_is_in_the_picture(name):
    schedule = make_schedule(name, 3, 6)
    count = sum(map(len, schedule.actions))
    svg = ElementTree.fromstring(to_svg(draw(name, schedule)))
    assert len(svg.findall(".//{*}title")) == count


def test_lengths_are_those_of_the_costs():
    costs = StageCosts((1.0, 3.0), (1.0, 0.0), (1.0, 0.0), (1, 1))
    text = to_text(draw("1f1b", make_schedule("1f1b", 2, 1), costs)).plain
    assert "rank 0  F0 ·········B0───" in text and "rank 1  ···F0────── " in text
