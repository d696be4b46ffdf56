"""`load` and `loads`: from a file or a text to a checked `Plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from compiler.diagnostics import Diagnostics
from compiler.dsl import codes  # noqa: F401  (declares the codes)
from compiler.dsl.check import Checker
from compiler.dsl.files import read_program, read_text, show_include_sites
from compiler.dsl.overrides import Sets, apply_sets
from compiler.dsl.plan import Plan
from compiler.dsl.rules import apply_rules, stages_per_rank


def load(path: str | Path, sets: Sets = ()) -> Plan:
    """Read, check and complete the plan in file `path`; raises `PlanError` with all mistakes."""
    diagnostics = Diagnostics()
    text = read_text(str(path), diagnostics)
    diagnostics.raise_if_errors()
    assert text is not None
    return _check(str(path), text, sets, diagnostics)


def loads(text: str, filename: str = "<plan>", sets: Sets = ()) -> Plan:
    """Check and complete a plan given as text; `include` is relative to `filename`."""
    return _check(filename, text, sets, Diagnostics())


def _check(path: str, text: str, sets: Sets, diagnostics: Diagnostics) -> Plan:
    program = read_program(path, text, diagnostics)
    apply_sets(program, sets, diagnostics)
    parts = Checker(program, diagnostics).parts()
    plan = Plan(path=path, text=program.sources[path], sources=program.sources, **parts)
    apply_rules(plan, diagnostics)
    show_include_sites(program, diagnostics)
    diagnostics.raise_if_errors(program.sources)
    return replace(_complete(plan), warnings=tuple(diagnostics.warnings))


def _complete(plan: Plan) -> Plan:
    """Give the options their value whose default depends on the rest of the plan."""
    changes: dict[str, Any] = {"microbatches": 1}
    for strategy in (plan.data, plan.pipeline):
        if strategy and strategy.microbatches:
            changes["microbatches"] = strategy.microbatches
    if plan.pipeline:
        changes["pipeline"] = replace(plan.pipeline, virtual=stages_per_rank(plan))
    if plan.precision.compute == "float16" and "loss_scale" not in plan.precision.given:
        changes["precision"] = replace(plan.precision, loss_scale="dynamic")
    train = plan.train
    if train.steps is None and train.epochs is None:
        train = replace(train, epochs=1)
    if train.directory is None:
        stem = "plan" if plan.path.startswith("<") else Path(plan.path).stem
        train = replace(train, directory=f"runs/{stem}")
    changes["train"] = train
    if plan.cluster and plan.cluster.devices is None:
        devices = max(1, plan.ranks // plan.cluster.nodes)
        changes["cluster"] = replace(plan.cluster, devices=devices)
    return replace(plan, **changes)
