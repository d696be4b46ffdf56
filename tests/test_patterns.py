"""Patterns of modules: each has an effect that the table counts, or a warning says that it has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.driver import Compilation, compile
from compiler.dsl import loads

NET = """\
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return x + self.down(self.drop(self.norm(self.up(x)).relu()))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.other = Layer()
        self.unused = nn.Linear(4, 4)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.other(x)).square().mean()
"""
PLAN = 'model "net.py:Net"\ninput x : float32[8, 4]\nmesh dp=2\ndata over dp\noptimizer sgd { lr = 0.1 }\n'

APPLIED = {
    'segment "head"': "1 module",
    'segment "layers.*.up"': "2 modules",
    'freeze "layers.*.up"': "4 parameters",
    'freeze "head"': "2 parameters",
    'freeze "*.bias"': "11 parameters",
    'opaque "head"': "1 module",
    'opaque "head"\nopaque "head.*"': "2 modules",
    'opaque "head"\nper_sample "head"': "1 opaque module",
    'local_statistics "layers.0"': "1 batch normalization",
    'local_statistics "*.norm"': "3 batch normalizations",
    'recompute "layers.*" = full': "2 segments",
    'recompute "layers.*" = full\nrecompute "layers.1" = none': "1 segment",
    'segment "layers.*.up"\nrecompute "layers.*.up" = full': "2 segments",
}
NOTHING = {
    'segment "unused"': ("the forward runs nothing there by itself", ""),
    'freeze "layers.*.drop"': ("there are no parameters", ""),
    'opaque "unused"': ("the forward calls no such module", ""),
    'per_sample "head"': ("it is for opaque modules, and none of these is one", 'opaque "head"'),
    'opaque "head"\nper_sample "head.0"': ("it is for opaque modules, and none of these is one", 'per_sample "head"'),
    'local_statistics "layers.*.up"': ("no batch statistics are taken there", ""),
    'recompute "layers.*.up" = full': (
        "whole segments are recomputed, and none is cut for it", 'add: segment "layers.*.up"'
    ),
    'recompute "head" = selective': ("whole segments are recomputed, and none is cut for it", 'add: segment "head"'),
}  # fmt: skip


@pytest.fixture
def compiled(tmp_path: Path):  # type: ignore[no-untyped-def]
    (tmp_path / "net.py").write_text(NET)

    def run(statements: str) -> Compilation:
        return compile(loads(f"{PLAN}{statements}\n", str(tmp_path / "x.plan")))

    return run


@pytest.mark.parametrize(("statements", "detail"), APPLIED.items(), ids=APPLIED)
def test_what_has_an_effect_is_counted(compiled, statements: str, detail: str) -> None:  # type: ignore[no-untyped-def]
    c = compiled(statements)
    last = statements.splitlines()[-1] if "none" not in statements else statements.splitlines()[0]
    (row,) = (row for row in c.asked if row.request == last)
    assert (row.outcome, row.detail) == ("applied", detail)
    assert not [warning for warning in c.warnings if warning.code == "W208"]


@pytest.mark.parametrize(("statements", "expected"), NOTHING.items(), ids=NOTHING)
def test_what_has_none_is_warned_of(compiled, statements: str, expected: tuple[str, str]) -> None:  # type: ignore[no-untyped-def]
    c, (why, help) = compiled(statements), expected
    last = statements.splitlines()[-1]
    (warning,) = (warning for warning in c.warnings if warning.code == "W208")
    assert warning.message == f"`{last.partition(' = ')[0]}` has no effect: {why}"
    assert warning.help == ((help,) if help else ()) and warning.span is not None
    (row,) = (row for row in c.asked if row.request == last)
    assert row.outcome == "no effect"
