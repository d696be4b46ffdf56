"""The JSON-lines log and the progress line."""

import io
import json

import pytest
import torch

from runtime.console import Progress, StepReport, memory_bytes
from runtime.log import JsonLog, read_log


def test_one_strict_json_object_per_line(tmp_path):
    path = tmp_path / "deep" / "log.jsonl"
    with JsonLog(path) as log:
        log.write(1, loss=torch.tensor(1.5), norms={"a": float("inf")}, rates=(1, float("nan")))
        assert read_log(path), "each record is there at once"
        with pytest.raises(TypeError):
            log.write(2, loss=object())

    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    records = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert records == [{"step": 1, "loss": 1.5, "norms": {"a": "inf"}, "rates": [1, "nan"]}]


def test_resuming_drops_what_will_be_repeated_and_a_torn_line(tmp_path):
    path = tmp_path / "log.jsonl"
    with JsonLog(path) as log:
        for step in range(1, 6):
            log.write(step, loss=step)
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    with JsonLog(path, after=3) as log:
        log.write(4, loss=40)
    assert [record["loss"] for record in read_log(path)] == [1, 2, 3, 40]
    with JsonLog(path) as log:
        log.write(1, loss=7)
    assert len(read_log(path)) == 1
    with JsonLog(tmp_path / "new.jsonl", after=3) as log:
        log.write(4)
    assert read_log(tmp_path / "new.jsonl") == [{"step": 4}]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(stream, steps=25, **options):
    with Progress(steps, stream=stream, **options) as progress:
        for step in range(1, steps + 1):
            progress.update(StepReport(step, 2.5, 4096, 0.5, grad_norm=1.25, lr=3e-4))
            if step == 2:
                progress.message("saved [x]")
    return stream.getvalue()


def test_plain_lines_where_there_is_no_terminal():
    lines = run(io.StringIO(), every=10).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 1/25",
        "saved [x]",
        "step 10/25",
        "step 20/25",
        "step 25/25",
    ]
    for part in ("loss 2.5000", "8.19k tokens/s", "500 ms/step", "GiB", "norm 1.25", "lr 0.0003", "ETA 0:12"):
        assert part in lines[0]


def test_a_run_that_ends_early_shows_its_last_step():
    stream = io.StringIO()
    with Progress(100, "samples", start=40, every=50, stream=stream) as progress:
        for step in (41, 42, 43):
            progress.update(StepReport(step, float("nan"), 8, 0.1))
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == ["step 41/100", "step 43/100"]
    assert "loss nan" in stream.getvalue()


def test_a_terminal_gets_one_line_that_is_redrawn():
    shown = run(Terminal())
    assert "\x1b[" in shown
    assert "step 25/25" in shown
    assert "saved [x]" in shown


def test_without_rich_a_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rich.live", None)
    assert "\x1b[" not in run(Terminal())


def test_memory_is_plausible():
    assert 2**24 < memory_bytes(torch.device("cpu")) < 2**40
