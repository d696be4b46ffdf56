"""The named schedules as printed."""

from compiler.schedule.named import make_schedule

ONE_F_ONE_B = """\
0F0,0F1,0B0,0F2,0B1,0B2
1F0,1B0,1F1,1B1,1F2,1B2
"""


def test_1f1b():
    assert str(make_schedule("1f1b", 2, 3)) == ONE_F_ONE_B


def test_fewer_microbatches_than_ranks():
    assert str(make_schedule("1f1b", 3, 1)) == "0F0,0B0\n1F0,1B0\n2F0,2B0\n"


def test_gpipe():
    assert str(make_schedule("gpipe", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
