"""The table of pipeline stages: what each runs, holds and takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from compiler.dsl.units import show_size
from compiler.report.numbers import count, duration

if TYPE_CHECKING:
    from compiler.driver import Compilation


@dataclass(frozen=True)
class StageRow:
    """A stage on its rank. `parameters`: elements of the whole parameters that it uses; `state`: bytes of them and of what
    belongs to them; `activations`: bytes of `in_flight` micro-batches; `working`: bytes while one call runs; `flops` and `seconds`: of one micro-batch's forward
    and backward on one device."""

    stage: int
    rank: int
    first: str
    last: str
    parameters: int
    state: int
    in_flight: int
    activations: int
    working: int
    flops: int
    seconds: float


def stage_rows(c: Compilation) -> Iterator[StageRow]:
    """One row for each stage; none without a pipeline."""
    assignment, schedule = c.linked.staging.assignment, c.linked.staging.schedule
    if assignment is None or schedule is None:
        return
    sizes = {spec.name: math.prod(spec.shape) for spec in c.program.parameters}
    for k, stage in enumerate(assignment.stages):
        run = stage.run
        yield StageRow(
            k,
            schedule.rank_of[k],
            stage.calls[0],
            stage.calls[-1],
            sum(sizes[name] for name in run.parameters),
            run.state,
            stage.in_flight,
            stage.in_flight * run.activation,
            run.transient,
            run.flops,
            run.seconds,
        )


def stage_table(rows: Iterable[StageRow]) -> Table:
    """For people."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("stage", "rank", "runs", "parameters", "state", "activations", "working", "FLOPs", "time"):
        table.add_column(title, justify="left" if title == "runs" else "right")
    for row in rows:
        table.add_row(
            str(row.stage),
            str(row.rank),
            row.first if row.first == row.last else f"{row.first} … {row.last}",
            count(row.parameters),
            show_size(row.state),
            f"{row.in_flight} x {show_size(row.activations // row.in_flight)}",
            show_size(row.working),
            count(row.flops),
            duration(row.seconds),
        )
    return table
