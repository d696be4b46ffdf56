"""What a compile prints, and the text of each level for `inspect`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compiler.emit.folder import kind_source
from compiler.ir.text import print_graph
from compiler.report.asked import APPLIED, NOTHING, PARTLY, Asked
from compiler.report.numbers import count
from compiler.report.stages import stage_rows, stage_table
from runtime.instructions import format_stream
from runtime.program import Program

if TYPE_CHECKING:
    from compiler.driver import Compilation

LEVELS = ("captured", "layouts", "segments", "local", "instructions")
COLORS = {APPLIED: "green", NOTHING: "dim", PARTLY: "yellow"}


def level_text(compilation: Compilation, level: str, only: str | None = None) -> str:
    """The printed form of one level; `only` keeps the segments whose name or calls match."""
    kinds = [
        kind
        for kind in compilation.linked.kinds.values()
        if only is None or only == kind.name or only in kind.calls
    ]
    if level == "captured":
        return print_graph(compilation.lowered)
    if level == "layouts":
        graphs = [g for g in (compilation.assigned.prologue, compilation.assigned.main) if g is not None]
        return "\n".join(print_graph(graph) for graph in graphs)
    if level == "segments":
        return "\n".join(segment_header(kind.calls) + print_graph(kind.graph) for kind in kinds)
    if level == "local":
        return "\n\n".join(kind_source(kind, compilation.program) for kind in kinds)
    return "\n".join(format_stream(stream) for stream in compilation.program.streams)


def segment_header(calls: list[str]) -> str:
    shown = ", ".join(calls[:4]) + (", …" if len(calls) > 4 else "")
    return f"# {len(calls)} call{'s' if len(calls) != 1 else ''}: {shown}\n"


def asked_table(items: Iterable[Asked]) -> Table:
    """The table of what was applied, partly applied, refused."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("asked for", "outcome", ""):
        table.add_column(title)
    for item in items:
        color = COLORS.get(item.outcome, "red")
        # A pattern such as w[qkv] is no markup.
        table.add_row(escape(item.request), f"[{color}]{item.outcome}[/{color}]", escape(item.detail))
    return table


def print_compilation(console: Console, compilation: Compilation, folder: Any = None) -> None:
    """The summary that ends every compile."""
    program = compilation.program
    console.print(asked_table(compilation.asked))
    if stages := list(stage_rows(compilation)):
        console.print(stage_table(stages))
    trained = sum(math.prod(p.shape) for p in program.parameters if p.trained)
    total = sum(math.prod(p.shape) for p in program.parameters)
    mesh = " ".join(f"{axis}={size}" for axis, size in program.axes.items()) or "one device"
    shown = f"{count(total)} parameters" + (f" ({count(trained)} trained)" if trained != total else "")
    console.print(
        f"{program.name}: {shown}, mesh {mesh}, {len(program.calls)} segments ({distinct_segments(program)} distinct), "
        f"{len(program.streams[0])} instructions, compiled in {sum(compilation.seconds.values()):.1f} s"
    )
    if folder is not None:
        console.print(f"program: {folder}")


def compilation_json(compilation: Compilation, folder: Any = None) -> dict[str, Any]:
    """The same for machines."""
    program = compilation.program
    return {
        "name": program.name,
        "folder": str(folder) if folder is not None else None,
        "mesh": program.axes,
        "parameters": sum(math.prod(p.shape) for p in program.parameters),
        "segments": len(program.calls),
        "distinct_segments": distinct_segments(program),
        "instructions": len(program.streams[0]),
        "reduced_bytes": reduced_bytes(program),
        "stages": [vars(row) for row in stage_rows(compilation)],
        "asked": [vars(item) for item in compilation.asked],
        "warnings": [str(item) for item in compilation.warnings],
        "seconds": compilation.seconds,
    }


def distinct_segments(program: Program) -> int:
    """Segments with code of their own; the prologue is none of them."""
    return len({call.kind for call in program.calls})


def reduced_bytes(program: Program) -> int:
    """Bytes of gradients that enter reductions in one step."""
    return sum(b.numel * getattr(torch, b.dtype).itemsize for b in program.buckets if b.axes)
