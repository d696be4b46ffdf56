"""Golden tests: from a plan to the printed graphs and instructions.

tests/golden/NAME.plan compiles to tests/golden/NAME.txt. After a change that is meant to change them, look at the
difference that `UPDATE_GOLDEN=1 pytest tests/test_golden.py` makes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compiler.driver import Compilation, Options, compile
from compiler.ir.graph import Graph
from compiler.ir.text import ParseError, parse_graph, print_graph
from compiler.ir.verify import verify_graph
from runtime.instructions import format_stream

FOLDER = Path(__file__).parent / "golden"
EXAMPLES = Path(__file__).parent.parent / "dsl_examples"
PLANS = sorted(FOLDER.glob("*.plan"))


def golden_text(compilation: Compilation) -> str:
    """What a compiled plan is compared by: graphs with layouts, segments, buckets, instructions."""
    graphs = [g for g in (compilation.assigned.prologue, compilation.assigned.main) if g is not None]
    sections = {
        "layouts": "\n".join(print_graph(graph, origins=False) for graph in graphs),
        "segments": "".join(f"{name}: {', '.join(kind.calls)}\n" for name, kind in compilation.linked.kinds.items()),
        "buckets": "".join(
            f"{b.name} over {', '.join(b.axes) or 'nothing'}: {', '.join(b.parameters)}\n" for b in compilation.program.buckets
        ),
        "instructions": "".join(map(format_stream, compilation.program.streams)),
    }
    return "\n".join(f"== {title}\n{text}" for title, text in sections.items())


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_plan_compiles_to_its_golden(path: Path) -> None:
    text, golden = golden_text(compile(path)), path.with_suffix(".txt")
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), "if the change is meant: UPDATE_GOLDEN=1 pytest tests/test_golden.py"


def read(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text()


def test_goldens_show_what_they_are_for() -> None:
    """What each golden is there to show, so that an update cannot lose it unseen."""
    assert "planc.all_reduce" in read("mlp").partition("== segments")[0], "the count of valid labels"
    prologue = read("gpt").partition("graph main")[0]
    assert "planc.all_reduce" in prologue and "['dp', 'micro']" in prologue
    assert read("gpt").partition("== instructions\n")[2].startswith("prologue\nforward begin @0\n")
    assert "aten.sum.dim_IntList" in read("batchnorm") and read("batchnorm").count("planc.all_reduce") >= 2
    assert "all_reduce" not in read("local_batchnorm")
    assert "input %x : float32[12, 8] {dp: S(0), micro: S(0)}" in read("uneven") and "planc.mask" in read("uneven")
    assert "dp" not in read("one_device")
    assert "planc.all_" not in layers("ring") and "{dp: S(0), cp: S(2, zigzag)} = planc.attention" in layers("ring")
    assert layers("ulysses").count("planc.all_to_all") == 8, "to the heads for q, k and v, and back, in each of two layers"


def layers(name: str) -> str:
    """The graph of a golden without the loss at its end."""
    return read(name).partition("== segments")[0].partition("aten.cross_entropy")[0].partition("planc.cross_entropy")[0]
    whole = read("tensor")
    layers = [line for line in whole.splitlines() if "['tp.0', 'tp.1']" in line and "float32[2, 8, 16]" in line]
    kinds = [line.partition("planc.")[2].partition("(")[0] for line in layers]
    # The embedding's sum and the head's gather, and between them each layer's two pairs.
    assert kinds == ["reduce_scatter", *["all_gather", "reduce_scatter"] * 4, "all_gather"]


@pytest.mark.parametrize("name", ["mlp", "encdec", "resnet", "vit", "gpt"])
def test_printed_graphs_parse_back(name: str) -> None:
    """Every graph that any pass makes prints, parses and prints the same, and is well formed when parsed."""
    seen: list[tuple[str, Graph]] = []

    def watch(after: str, graph: Graph) -> None:
        for origins in (True, False):
            text = print_graph(graph, origins)
            parsed = parse_graph(text)
            assert print_graph(parsed, origins) == text, after
            verify_graph(parsed, after)
        seen.append((after, graph))

    compilation = compile(EXAMPLES / f"{name}.plan", options=Options(watch=watch))
    names = [after for after, _ in seen]
    assert names[0] == "capture" and {"lower_losses", "assign_layouts", "lift_vary"} < set(names)
    for kind in compilation.linked.kinds.values():
        watch(kind.name, kind.graph)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected 'graph NAME {'"),
        ("graph g {\n", "line 1"),
        ("graph g {\n  input x\n}", "line 2: not an input"),
        ("graph g {\n  input %x : float32[2] {dp: Q}  # kind=slot\n}", "line 2: not a placement: 'Q'"),
        ("graph g {\n  output loss = %x\n}", "line 2"),
        ("graph g {\n  input %x : float32[2]  # kind=slot\n  %y : float32[2] = aten.relu.default(%z)\n}", "line 3"),
    ],
)
def test_what_is_no_graph_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ParseError) as error:
        parse_graph(text)
    assert message in str(error.value)
