"""The report of `planc inspect --html`: one well-formed file that stands alone, and pictures inside their frames."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from compiler.analysis.estimate import Estimate, estimate
from compiler.cli import main
from compiler.driver import Compilation, compile
from compiler.report.charts import POINTS, WIDTH, memory_chart, rows, thinned
from compiler.report.html import html_report
from tests.analysis.plans import plan_of

VOID = {"meta", "path", "rect"}


class Balanced(HTMLParser):
    """Every tag that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def compilation() -> Compilation:
    return compile(plan_of("tp-sequence"))


@pytest.fixture(scope="module")
def found(compilation: Compilation) -> Estimate:
    return estimate(compilation)


def test_page(compilation: Compilation, found: Estimate):
    page = html_report(compilation)
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    assert parser.ids == ["asked", "memory", "time", "traffic", "why", "graphs", "plan"]
    text = "".join(parser.text)
    for part in (
        "activations",
        "reduce_scatter over tp",
        "aten.linear",
        'column "layers.*.attn.w[qkv]"',
        "forward layers.0 @0",
    ):
        assert part in text
    assert not re.search(r"(src|href)=|<script|@import|url\(", page)  # nothing from elsewhere


def test_memory_chart(found: Estimate):
    """The areas add up to what is alive before each instruction; the line touches the peak."""
    run, memory, time = found.runs[0], found.memory[0], found.time.stages[0]
    chart = memory_chart(run, memory, time, available=memory.peak.bytes // 2)
    heights = {area.name: [float(y) for y in re.findall(r",([\d.]+)", area.path)] for area in chart.areas}
    for ys in heights.values():
        assert all(0 <= y <= chart.height for y in ys)
    topmost = list(heights.values())[-1]
    first = chart.height * (1 - sum(memory.resting.values()) / chart.top)
    assert topmost[0] == pytest.approx(first, abs=0.1)
    peaks = [float(y) for y in re.findall(r",([\d.]+)", chart.peaks)]
    assert min(peaks) == pytest.approx(chart.height * (1 - memory.peak.bytes / chart.top), abs=0.1)
    assert chart.limit is not None and 0 < chart.limit < chart.height


def test_thinning_keeps_the_highest():
    values = [k % 1000 for k in range(10 * POINTS)]
    kept = thinned(values)
    assert len(kept) <= POINTS and max(values[k] for k in kept) == 999 and kept == sorted(kept)


def test_timeline(found: Estimate):
    """Bars are in order, inside the picture, and as long as the instructions together."""
    for stage, bars in zip(found.time.stages, rows(found.time)):
        assert all(a.x + a.width <= b.x + 0.3 for a, b in zip(bars, bars[1:]))
        assert bars[-1].x + bars[-1].width <= WIDTH * stage.seconds / found.time.seconds + 0.3


def test_command(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.plan").write_text(plan_of("dp").text)
    assert main(["inspect", "x.plan", "--html", "x.html"]) == 0
    assert capsys.readouterr().out == "report: x.html\n"
    assert (tmp_path / "x.html").read_text("utf-8").startswith("<!DOCTYPE html>")


def test_the_schedule_of_a_pipeline_is_drawn():
    page = html_report(compile(plan_of("pipeline-tied")))
    assert "zb_h1: 2 ranks, 2 micro-batches" in page and "input-gradient part of stage 1" in page


def test_the_schedule_of_auto_is_drawn_in_its_own_times():
    plan = plan_of("pipeline")
    page = html_report(compile(replace(plan, pipeline=replace(plan.pipeline, schedule="auto"))))
    assert re.search(r"auto: 2 ranks, 4 micro-batches.*makespan [\d.]+ [mµ]s, bubble", page, re.DOTALL)
