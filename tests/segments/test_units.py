"""Where a graph is cut: lists of layers, however long, and modules that the plan names, inside of others too."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.analysis.verify import verify
from compiler.diagnostics import PlanError
from compiler.driver import Compilation, compile
from compiler.dsl import loads
from compiler.dsl.plan import Pattern
from compiler.segments.split import unit_of, units

PLAN = """\
model "dsl_examples.models.llama:Llama" {{ layers = {layers}, dim = 16, heads = 4, kv_heads = 2, vocab = 32 }}
input tokens : int64[4, 8]
input labels : int64[4, 8]
mesh {mesh}
optimizer adamw {{ lr = 0.01 }}
{strategies}
"""


def plan(strategies: str, mesh: str, layers: int = 1) -> str:
    return PLAN.format(layers=layers, mesh=mesh, strategies=strategies)


def calls(c: Compilation) -> list[str]:
    return [call.name for call in c.program.calls]


@pytest.mark.parametrize(
    ("mesh", "strategies", "applied"),
    [
        ("tp=2", "tensor over tp { sequence = on }", "sequence = on"),
        ("pp=2", "pipeline over pp { microbatches = 2 }", "pipeline over pp"),
        ("dp=2", 'data over dp\nrecompute "layers.*" = full', 'recompute "layers.*" = full'),
        ("dp=2", "data over dp\nzero over dp { stage = 3 }", "zero over dp"),
    ],
    ids=["sequence", "pipeline", "recompute", "zero"],
)
def test_one_layer_is_a_list_of_layers(mesh: str, strategies: str, applied: str) -> None:
    text = plan(strategies, mesh)
    c = compile(loads(text))
    assert "layers.0" in calls(c)
    assert {a.outcome for a in c.asked if a.request.startswith(applied)} == {"applied"}
    verdict = verify(loads(text), 2)
    assert verdict.ok, verdict.worst


def test_a_wrapper_is_no_layer(tmp_path: Path) -> None:
    """Nor does it hide the layers inside."""
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.all = nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))\n"
        "    def forward(self, x):\n"
        "        return self.all(x).sum()\n"
    )
    text = 'model "net.py:Net"\ninput x : float32[2, 4]\nmesh dp=1\ndata over dp\n'
    assert calls(compile(loads(text, str(tmp_path / "x.plan"))))[:3] == ["all.0.0", "all.0.1", "all.0.2"]


CLASSES = {name: name for name in ("a", "a.0.up", "a.0.down", "a.1.up", "a.1.down", "head")} | {"a.0": "A", "a.1": "A"}


def named(*patterns: str) -> list[str]:
    return units({"a": ["a.0", "a.1"]}, CLASSES, [Pattern(text) for text in patterns])


def test_named_modules_may_lie_in_layers_or_hold_them() -> None:
    assert named() == ["a.0", "a.1"]
    assert named("head") == ["a.0", "a.1", "head"]
    assert named("a.*.up") == ["a.0", "a.1", "a.0.up", "a.1.up"]
    assert named("*") == ["a", "head"], "a pattern means the outermost modules that it fits"
    assert named("a", "a.0.up") == ["a", "a.0.up"]
    assert [unit_of(path, {"a.0", "a.0.up"}) for path in ("a.0.up.w", "a.0.down", "b")] == ["a.0.up", "a.0", ""]


def test_segments_inside_of_layers() -> None:
    strategies = 'pipeline over pp { microbatches = 2 }\ndata over dp\nsegment "layers.*.mlp"\n'
    text = plan(strategies + 'recompute "layers.*.mlp" = full', "pp=2 dp=2", layers=2)
    c = compile(loads(text))
    assert calls(c)[2:5] == ["layers.0", "layers.0.mlp", "layers.0.part2"]
    assert {name for kind in c.linked.kinds.values() if kind.policy == "full" for name in kind.calls} == {
        "layers.0.mlp", "layers.1.mlp"
    }  # fmt: skip
    assert verify(loads(text), 2).ok


@pytest.mark.parametrize(
    ("layers", "ranks", "patterns"),
    [(1, 4, '"layers.*.mlp"'), (2, 8, '"layers.*.attn", "layers.*.mlp"'), (1, 32, "")],
)
def test_too_many_stages_name_what_could_be_segments(layers: int, ranks: int, patterns: str) -> None:
    """Those that are named are enough."""
    strategies = f"pipeline over pp {{ microbatches = {ranks} }}\n"
    with pytest.raises(PlanError) as caught:
        compile(loads(plan(strategies, f"pp={ranks}", layers)))
    (found,) = caught.value.diagnostics
    advice = f", or cut the model finer: segment {patterns}" if patterns else ""
    assert found.code == "E232" and found.help == (f"use fewer stages{advice}",)
    if patterns:
        assert len(calls(compile(loads(plan(f"{strategies}segment {patterns}", f"pp={ranks}", layers))))) > ranks


def test_a_model_without_lists_is_cut_at_its_modules(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up, self.down, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 2)\n"
        "    def forward(self, x):\n"
        "        return self.head(self.down(self.up(x))).sum()\n"
    )
    text = 'model "net.py:Net"\ninput x : float32[4, 4]\nmesh pp=3\npipeline over pp { microbatches = 4 }\n'
    with pytest.raises(PlanError) as caught:
        compile(loads(text, str(tmp_path / "x.plan")))
    (help,) = caught.value.diagnostics[0].help
    assert help == 'use fewer stages, or cut the model finer: segment "up", "down"'
    text += 'segment "up", "down"\n'
    assert calls(compile(loads(text, str(tmp_path / "x.plan")))) == ["up", "down", "end"]
