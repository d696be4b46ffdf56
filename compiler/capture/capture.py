"""capture: from a model factory to a graph."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from compiler.capture.failures import explain
from compiler.capture.importer import dtype_name, import_program
from compiler.capture.model import Built, build_model, canonical_names, module_tables
from compiler.capture.normalize import normalize
from compiler.capture.origins import Origins
from compiler.capture.quiet import preserved, quiet
from compiler.capture.request import BufferInfo, Captured, CaptureRequest, Input, ParameterInfo
from compiler.capture.wrapper import Exported
from compiler.diagnostics import PlanError
from compiler.ir.graph import Graph
from runtime.factory import resolve

PREFIX = "model"
"""The model's path inside what is exported."""


def capture(request: CaptureRequest) -> Captured:
    """The model as a graph in normal form. Raises PlanError for every mistake in the plan or the model."""
    with preserved(), quiet():
        try:
            return _capture(request)
        except PlanError:
            raise
        except Exception as error:
            found = explain(error, request)
            if found is None:
                raise
            raise PlanError(found, request.sources) from error


def _capture(request: CaptureRequest) -> Captured:
    dtype = getattr(torch, request.dtype) if request.dtype else None
    loss = resolve(request.loss[0], request.base) if request.loss else None
    built = build_model(request.factory, request.options, request.base, dtype)
    model = built.model
    program, exported = export(built, request, loss, dtype)
    names, ties = canonical_names(model)
    inputs = [spec.name for spec in request.inputs]
    imported = import_program(
        program, inputs, exported.outputs.roles, names, lambda name: not matches(request.freeze, name),
        Origins(model, PREFIX),
    )  # fmt: skip
    graph = normalize(imported.graph, imported.constants)
    classes, lists = module_tables(model)
    return Captured(
        graph,
        parameters(model, graph, request.freeze),
        buffers(model, graph),
        used_constants(graph, imported.constants),
        ties,
        classes,
        lists,
        list(exported.outputs.notes),
    )


def export(built: Built, request: CaptureRequest, loss: Any, dtype: torch.dtype | None) -> tuple[ExportedProgram, Exported]:
    """Trace the model with its loss; mutation is made functional, composite operators stay whole."""
    widen = request.dtype == "float64"
    names = [spec.name for spec in request.inputs]
    options = request.loss[1] if request.loss else {}
    exported = Exported(built.model, names, loss, options, request.keep_outputs, widen)
    if built.mode is not None:
        with built.mode:
            examples = tuple(example(spec, dtype) for spec in request.inputs)
            program = torch.export.export(exported, examples, strict=False)
    else:
        examples = tuple(example(spec, dtype) for spec in request.inputs)
        program = torch.export.export(exported, examples, strict=False)
    return program.run_decompositions({}), exported


def example(spec: Input, dtype: torch.dtype | None) -> Tensor:
    """A tensor of the input's type; each input has its own, for one object given twice would be taken for one input."""
    own = getattr(torch, spec.dtype)
    return torch.zeros(spec.shape, dtype=dtype if dtype is not None and own.is_floating_point else own)


# -- what the graph does not say ---------------------------------------------------------------------------------------


def matches(patterns: Sequence[Any], name: str) -> bool:
    """Whether a dotted name fits one of the patterns (plan patterns or plain text); `*` is any text."""
    texts = (getattr(pattern, "text", pattern) for pattern in patterns)
    return any(fnmatchcase(name, text) or name.startswith(f"{text}.") for text in texts)


def parameters(model: nn.Module, graph: Graph, freeze: Sequence[Any]) -> dict[str, ParameterInfo]:
    used = used_inputs(graph)
    return {
        name: ParameterInfo(
            tuple(p.shape), dtype_name(p.dtype), p.requires_grad and not matches(freeze, name), name in used
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
