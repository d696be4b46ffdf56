"""Writing the program folder: beside the old one first, then in its place."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.emit.code import segment_source
from compiler.ir.text import print_graph
from runtime.constants import write_constants
from runtime.program import Program, save

if TYPE_CHECKING:
    from compiler.driver import Compilation
    from compiler.link import Kind


def write_folder(compilation: Compilation, folder: Path) -> Path:
    """Program, generated code, and the graphs for people to read, under `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save(compilation.program, fresh)
        (fresh / "segments").mkdir()
        for kind in compilation.linked.kinds.values():
            (fresh / "segments" / f"{kind.name}.py").write_text(kind_source(kind, compilation.program))
        write_constants(fresh, compilation.captured.constants)
        for name, text in graph_texts(compilation).items():
            (fresh / "graphs").mkdir(exist_ok=True)
            (fresh / "graphs" / f"{name}.txt").write_text(text)
        (fresh / "plan.plan").write_text(compilation.plan.text)
        if folder.exists():
            if not (folder / "program.yaml").exists() and any(folder.iterdir()):
                raise FileExistsError(f"{folder} exists and holds no program; planc will not overwrite it")
            shutil.rmtree(folder)
        fresh.rename(folder)
        folder.chmod(0o755)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def kind_source(kind: Kind, program: Program) -> str:
    """The code of a kind: its backward is there in two parts too if a stream of the program runs those."""
    names = set(kind.calls)
    splits = any(i.op == "backward_input" and i.target in names for stream in program.streams for i in stream)
    return segment_source(kind.name, kind.code, kind.calls, kind.split if splits else None)


def graph_texts(compilation: Compilation) -> dict[str, str]:
    """The printed graph at each level."""
    texts = {"captured": print_graph(compilation.lowered)}
    graphs = [g for g in (compilation.assigned.prologue, compilation.assigned.main) if g is not None]
    texts["layouts"] = "\n".join(print_graph(graph) for graph in graphs)
    texts["segments"] = "\n".join(print_graph(kind.graph) for kind in compilation.linked.kinds.values())
    return texts
