"""Learning rate schedules."""

import math

import pytest

from runtime.lr import Schedule


def test_warmup_starts_above_zero_and_ends_at_the_peak():
    schedule = Schedule(1.0, warmup=4)
    assert [schedule(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_min_lr_at_total_and_stays():
    schedule = Schedule(1.0, "linear", warmup=2, total=6, min_lr=0.2)
    assert [round(schedule(step), 12) for step in range(1, 9)] == [1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]


def test_cosine_falls_along_half_a_wave():
    schedule = Schedule(2.0, "cosine", total=8, min_lr=1.0)
    for step in range(9):
        assert schedule(step) == pytest.approx(1.5 + 0.5 * math.cos(math.pi * step / 8), abs=1e-15)
    assert schedule(100) == 1.0


def test_from_a_programs_options():
    options = {"lr": 0.1, "schedule": "cosine", "warmup": 2, "total": None, "min_lr": 0.01, "eps": 1e-8}
    assert Schedule.from_options(options, 10) == Schedule(0.1, "cosine", 2, 10, 0.01)
    assert Schedule.from_options({**options, "total": 7}, 10).total == 7
    assert Schedule.from_options({}, 10)(3) == 0.0


def test_a_run_within_its_warmup_or_of_unknown_length_never_falls():
    options = {"lr": 1.0, "schedule": "linear", "warmup": 5}
    assert Schedule.from_options(options, 3)(2) == 0.6
    assert Schedule.from_options(options, 0)(1000) == 1.0


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="unknown schedule 'step'"):
        Schedule(1.0, "step")
    with pytest.raises(ValueError, match="needs total > warmup"):
        Schedule(1.0, "cosine", warmup=5, total=5)
