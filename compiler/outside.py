"""What a plan names outside of itself: a schedule, the model, a loss, times, data. Found without building the model,
with the diagnostics that compiling gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

from torch import nn

from compiler.capture.checks import check_inputs, check_loss
from compiler.capture.failures import factory_failure
from compiler.capture.quiet import preserved, quiet, real_imports
from compiler.capture.request import CaptureRequest
from compiler.diagnostics import Diagnostic, PlanError, closest, declare_codes
from compiler.dsl.plan import Plan
from compiler.pipeline.measured import read_times
from compiler.pipeline.staging import pipeline_axis
from compiler.schedule.planned import check_schedule
from runtime.data import DataError
from runtime.data.source import check_source, text_folder
from runtime.factory import FactoryError, prepare, resolve
from runtime.program import Input

declare_codes({"E107": "The data of `train` cannot be found, or does not fit the plan's inputs."})


def check_outside(plan: Plan) -> None:
    """Raise PlanError with everything that is missing or does not fit."""
    checks: list[Callable[[Plan], None]] = [check_schedule, check_model, check_loss_function, check_times, check_data]
    found: list[Diagnostic] = []
    sources = dict(plan.sources)
    for check in checks:
        try:
            check(plan)
        except PlanError as error:
            found += error.diagnostics
            sources |= error.sources
    if found:
        raise PlanError(found, sources)


def check_model(plan: Plan) -> None:
    """The factory is there and takes its options; where it is a module's class, its forward takes the inputs."""
    request = CaptureRequest.from_plan(plan)
    try:
        with preserved(), quiet(), real_imports():
            make, _ = prepare(request.factory, request.options, request.base)
    except FactoryError as failure:
        raise factory_failure(failure, request, request.span) from failure
    if inspect.isclass(make) and issubclass(make, nn.Module):
        check_inputs(make, request)


def check_loss_function(plan: Plan) -> None:
    """The loss is there, and can be called as it is going to be."""
    request = CaptureRequest.from_plan(plan)
    if request.loss is None:
        return
    try:
        with preserved(), quiet(), real_imports():
            loss = resolve(request.loss[0], request.base)
    except FactoryError as failure:
        raise factory_failure(failure, request, request.loss_span) from failure
    check_loss(loss, request)


def check_times(plan: Plan) -> None:
    """The trace is there, and is one."""
    if plan.pipeline is not None and plan.pipeline.times is not None and pipeline_axis(plan):
        read_times(plan)


def check_data(plan: Plan) -> None:
    """The data is there, of its kind, and fits the inputs as far as can be told without reading it."""
    inputs = [Input(spec.name, spec.dtype, spec.shape, spec.batch_dim) for spec in plan.inputs]
    base = str(plan.model.folder.resolve())
    data, help = plan.train.data, ""
    try:
        with preserved(), quiet(), real_imports():
            check_source(data, inputs, lambda spec: resolve(spec, base))
        return
    except DataError as failure:
        message = str(failure)
        folder = text_folder(data)
        if folder is not None and not folder.is_dir():
            near = near_text(folder)
            help = f"did you mean `{near}`?" if near else "the name is relative to the working directory"
    except FactoryError as failure:
        at = f" ({failure.place[0]}:{failure.place[1]})" if failure.place else ""
        message, help = ": ".join(filter(None, (failure.what, failure.why))) + at, failure.suggestion
        near = near_source(data) if failure.kind == "path" and not help.startswith("did you mean") else None
        help = f"did you mean `{near}`?" if near else help
    span = plan.train.given.get("data", plan.train.span)
    raise PlanError([Diagnostic("error", "E107", message, span, help=(help,) if help else ())], plan.sources)


def near_text(folder: Path) -> str | None:
    """The text source that one of a folder that is not there is likely meant to be."""
    names = [path.name for path in folder.parent.glob("*") if path.is_dir()]
    near = closest(folder.name, [*names, "stdlib"] if folder.parent == Path() else names)
    return f"text:{folder.with_name(near)}" if near else None


def near_source(data: str) -> str | None:
    """The source of a known kind that one that is none of the user's functions is likely meant to be."""
    kind, _, rest = data.partition(":")
    if not rest or closest(kind, ["text"]) is None:
        return None
    return f"text:{rest}" if Path(rest).is_dir() else near_text(Path(rest)) or f"text:{rest}"
