"""Traces of a run: every instruction of every rank, with stage and micro-batch, and the bubble that they show."""

from __future__ import annotations

import json

import pytest

from compiler.driver import compile
from compiler.dsl import loads
from runtime.simulate import simulate
from runtime.program import load
from runtime.trace import Event, Tracer, measured_bubble, write_trace
from runtime.train import traced_steps
from tests.zoo import get, plan_text


def test_a_trace_has_every_instruction(tmp_path) -> None:
    extra = "pipeline over pp { schedule = 1f1b, microbatches = 2 }"
    text = plan_text(get("llama-tiny"), batch=4, mesh="pp=2", microbatches=1, extra=extra)
    program = load(compile(loads(text, "p.plan")).write(tmp_path / "program"))
    batch = get("llama-tiny").batch(4)

    def body(session):
        session.step(batch)
        with Tracer(session) as tracer:
            session.step(batch)
        session.step(batch)
        return tracer.gathered()

    events, other = simulate(program, body)
    assert len(events) == len(other) == sum(map(len, program.streams))
    assert {(e.rank, e.stage) for e in events} == {(0, 0), (1, 1)} and {e.step for e in events} == {2}
    assert [e.instruction for e in events if e.rank == 0] == [str(i) for i in program.streams[0]]
    write_trace(events, tmp_path / "deep" / "trace.json", {0: "rank 0", 1: "rank 1"})
    written = json.loads((tmp_path / "deep" / "trace.json").read_text())["traceEvents"]
    shown = [entry for entry in written if entry["ph"] == "X"]
    assert len(shown) == len(events) and min(entry["ts"] for entry in shown) == 0
    assert {entry["args"]["micro-batch"] for entry in shown if entry["cat"] == "forward"} == {0, 1}
    assert measured_bubble(events) >= 0


def test_the_bubble_is_what_the_busiest_rank_waits() -> None:
    def event(rank: int, start: float, end: float) -> Event:
        return Event(rank, rank, 0, "forward a @0", "forward", 0, start, end)

    # Rank 0 computes 2 of 3 seconds, rank 1 the last one.
    assert measured_bubble([event(0, 0, 1), event(0, 1, 2), event(1, 2, 3)]) == pytest.approx(0.5)


def test_traced_steps_skip_the_first() -> None:
    assert list(traced_steps(0, 10)) == [2, 3, 4]
    assert list(traced_steps(0, 1)) == [1]
    assert list(traced_steps(4, 6)) == [6]
