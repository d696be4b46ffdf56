"""capture: from a model factory to a graph."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from compiler.capture import failures, repeats
from compiler.capture.autocast import autocasting, operator_lists
from compiler.capture.checks import (
    check_dtypes,
    check_inputs,
    check_learns,
    check_loss,
    check_model,
    check_names,
    check_patterns,
    check_positions,
    loss_hints,
)
from compiler.capture.failures import OutputError, Unsupported
from compiler.capture.importer import dtype_name, import_program
from compiler.capture.model import Built, build_model, canonical_names, convert_parameters, module_tables
from compiler.capture.normalize import normalize
from compiler.capture.opaque import replaced
from compiler.capture.origins import Origins
from compiler.capture.quiet import preserved, quiet, real_imports
from compiler.capture.request import BufferInfo, Captured, CaptureRequest, Input, ParameterInfo
from compiler.capture.rows import Use, row_constants
from compiler.capture.state import State
from compiler.capture.wrapper import Exported
from compiler.dsl.plan import Pattern
from compiler.ir.graph import Graph, Origin
from runtime.factory import FactoryError, resolve

PREFIX = "model"
"""The model's path inside what is exported."""


def capture(request: CaptureRequest) -> Captured:
    """The model as a graph in normal form. Raises PlanError for every mistake in the plan or the model."""
    with preserved(), quiet(), real_imports(), operator_lists(request.autocast):
        try:
            return _capture(request)
        except Unsupported as failure:
            raise failures.unsupported(failure, request) from failure


def _capture(request: CaptureRequest) -> Captured:
    dtype = getattr(torch, request.dtype) if request.dtype else None
    built, loss = load(request, dtype)
    model = built.model
    if not request.train:
        model.eval()
    own = {name: dtype_name(p.dtype) for name, p in model.named_parameters()}
    compute = getattr(torch, request.compute) if request.compute else None
    if compute is not None:
        convert_parameters(model, compute)
    if dtype == torch.float64:
        torch.set_default_dtype(dtype)  # what forward makes without a dtype; restored by `preserved`
    check_model(model, request)
    check_inputs(model, request)
    check_loss(loss, request)
    check_patterns(model, request)
    exported = Exported(
        model, [spec.name for spec in request.inputs], loss, request.loss[1] if request.loss else {},
        request.keep_outputs, request.dtype == "float64", compute,
    )  # fmt: skip
    with autocasting(request.autocast):
        program = trace(exported, built, request, dtype)
        counted = counts_rows(exported, built, request, dtype) if request.check_rows else None
    names, ties = canonical_names(model)
    check_names(names, request)
    imported = import_program(
        program, [spec.name for spec in request.inputs], exported.outputs.roles, names,
        lambda name: not matches(request.freeze, name), Origins(model, PREFIX),
    )  # fmt: skip
    graph = normalize(imported.graph, imported.constants)
    with autocasting(request.autocast):
        check_repeats(exported, built, request, dtype, graph)
    check_dtypes(graph)
    check_positions(graph)
    check_learns(graph, model, request)
    classes, lists = module_tables(model)
    return Captured(
        graph,
        parameters(model, graph, request.freeze, own),
        buffers(model, graph),
        used_constants(graph, imported.constants),
        ties,
        classes,
        lists,
        list(exported.outputs.notes),
        counted,
    )


def load(request: CaptureRequest, dtype: torch.dtype | None) -> tuple[Built, Callable[..., Any] | None]:
    """The model, and the loss function if the plan names one."""
    span = request.loss_span
    try:
        loss = resolve(request.loss[0], request.base) if request.loss else None
        span = request.span
        return build_model(request.factory, request.options, request.base, dtype), loss
    except FactoryError as failure:
        raise failures.factory_failure(failure, request, span) from failure


def trace(exported: Exported, built: Built, request: CaptureRequest, dtype: torch.dtype | None) -> ExportedProgram:
    """Trace the model with its loss; mutation is made functional, composite operators stay whole."""
    context = built.mode or contextlib.nullcontext()

    def examples() -> tuple[Tensor, ...]:
        return tuple(example(spec, dtype) for spec in request.inputs)

    def eager() -> BaseException | None:
        """How the model fails without being traced, if it does."""
        with preserved(), context:
            batch = dict(zip(exported.names, examples()))
            try:
                exported.call(batch)
            except Exception as failure:
                return None if type(failure).__module__.startswith("torch._subclasses") else failure
        return None

    try:
        with context, replaced(exported.model, opaque_paths(exported.model, request), rows(request)):
            program = torch.export.export(exported, examples(), strict=False)
        check_constants(program, exported.model)
        return program.run_decompositions({})
    except Exception as failure:
        try:
            raise failures.trace_failure(failure, request, eager) from failure
        except OutputError as output:
            raise failures.no_loss(output, request, loss_hints(built.model, request)) from failure


def counts_rows(exported: Exported, built: Built, request: CaptureRequest, dtype: torch.dtype | None) -> Use | None:
    """Where the model calculates with the number of rows, if it does."""
    size = rows(request)
    if size is None:
        return None
    opaque = opaque_paths(exported.model, request)

    def batch(count: int) -> tuple[int, dict[str, Tensor]]:
        return count, {spec.name: example(with_rows(spec, count), dtype) for spec in request.inputs}

    def run(made: tuple[int, dict[str, Tensor]]) -> None:
        with replaced(exported.model, opaque, made[0]):
            exported.call(made[1])

    state = State(exported.model)
    with preserved(), built.mode or contextlib.nullcontext():
        try:
            return row_constants(batch, run, size)
        except Exception:
            # It runs at this batch size only: the size is in it somewhere.
            return Use("", "", "")
        finally:
            state.restore()


def check_repeats(
    exported: Exported, built: Built, request: CaptureRequest, dtype: torch.dtype | None, graph: Graph
) -> None:
    """Raise Unsupported if the forward keeps something in the model that makes its later calls differ."""
    model = exported.model
    if not exported.outputs.kept or built.mode is None:
        return
    batch: dict[str, Tensor] = {}

    def data() -> list[Tensor]:
        batch.update({spec.name: example(spec, dtype) for spec in request.inputs})
        changing = [b for name, b in model.named_buffers() if f"buffer:{name}" in graph.outputs]
        return [*batch.values(), *model.parameters(), *changing]

    state = State(model)
    try:
        with preserved(), built.mode, replaced(model, opaque_paths(model, request), rows(request)):
            found = repeats.difference(lambda: exported.call(batch), data)
    finally:
        state.restore()
    if found is not None:
        what, origin = found
        names = ", ".join(note.split("`")[1] for note in exported.outputs.kept)
        raise Unsupported(f"{what}: it keeps `{names}`", origin, help=repeats.KEEP)


def with_rows(spec: Input, rows: int) -> Input:
    if spec.batch_dim is None:
        return spec
    shape = list(spec.shape)
    shape[spec.batch_dim] = rows
    return dataclasses.replace(spec, shape=tuple(shape))


def example(spec: Input, dtype: torch.dtype | None) -> Tensor:
    """A tensor of the input's type; each input has its own, for one object given twice would be taken for one input."""
    own = getattr(torch, spec.dtype)
    return torch.zeros(spec.shape, dtype=dtype if dtype is not None and own.is_floating_point else own)


def opaque_paths(model: nn.Module, request: CaptureRequest) -> list[str]:
    """The outermost modules that the patterns name."""
    texts = [getattr(pattern, "text", pattern) for pattern in request.opaque]
    named = [path for path, _ in model.named_modules() if path and any(fnmatchcase(path, text) for text in texts)]
    return [path for path in named if not any(path.startswith(f"{other}.") for other in named)]


def rows(request: CaptureRequest) -> int | None:
    """The size of the batch."""
    return next((spec.shape[spec.batch_dim] for spec in request.inputs if spec.batch_dim is not None), None)


def check_constants(program: ExportedProgram, model: nn.Module) -> None:
    """Tensors that the model holds without a name have no values here. Raises Unsupported."""
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in program.graph.find_nodes(op="placeholder"):
        spec = specs[node.name]
        if spec.kind is not InputKind.CONSTANT_TENSOR or not isinstance(program.constants[spec.target], FakeTensor):
            continue
        user = next(iter(node.users), node)
        shape = list(program.constants[spec.target].shape)
        what = f"the model uses a tensor {shape} that is neither a parameter nor a buffer"
        raise Unsupported(what, Origins(model, PREFIX).of(user.meta, Origin()), "E127")


# -- what the graph does not say ---------------------------------------------------------------------------------------


def matches(patterns: Sequence[Any], name: str) -> bool:
    """Whether one of the patterns (plan patterns or plain text) fits a dotted name or a module that holds it."""
    return any(Pattern(getattr(pattern, "text", pattern)).covers(name) for pattern in patterns)


def parameters(
    model: nn.Module, graph: Graph, freeze: Sequence[Any], own: Mapping[str, str]
) -> dict[str, ParameterInfo]:
    used = used_inputs(graph)
    return {
        name: ParameterInfo(
            tuple(p.shape), dtype_name(p.dtype), own[name], p.requires_grad and not matches(freeze, name), name in used
        )
        for name, p in model.named_parameters()
    }


def buffers(model: nn.Module, graph: Graph) -> dict[str, BufferInfo]:
    persistent = set(model.state_dict(keep_vars=True))
    return {
        name: BufferInfo(tuple(b.shape), dtype_name(b.dtype), name in persistent, f"buffer:{name}" in graph.outputs)
        for name, b in model.named_buffers()
    }


def used_inputs(graph: Graph) -> set[str]:
    read = {value for node in graph.nodes for value in node.inputs} | set(graph.outputs.values())
    return {value.name for value in graph.inputs if value in read}


def used_constants(graph: Graph, constants: dict[str, Tensor]) -> dict[str, Tensor]:
    used = used_inputs(graph)
    graph.inputs = [value for value in graph.inputs if value.kind != "constant" or value.name in used]
    return {name: tensor for name, tensor in constants.items() if name in used}
