"""Checks of the model against the plan, before and after it is traced."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from compiler.capture import failures
from compiler.capture.failures import Unsupported
from compiler.capture.request import CaptureRequest
from compiler.diagnostics import Diagnostic, closest, did_you_mean
from compiler.ir.graph import Graph, Node, values_in
from runtime.factory import forward_arguments


def check_inputs(model: nn.Module | type[nn.Module], request: CaptureRequest) -> None:
    """Every input has an argument of the forward of a module or class, and every required argument an input."""
    named, required, takes_any = forward_arguments(model)
    given = [spec.name for spec in request.inputs]
    lacking = [name for name in required if name not in given]
    kind = model.__name__ if isinstance(model, type) else type(model).__name__
    found = []
    for spec in request.inputs:
        # An input that forward does not take may be for the loss; but not where forward lacks one of nearly this name.
        unknown = not takes_any and request.loss is None or closest(spec.name, lacking) is not None
        if spec.name not in named and unknown:
            takes = ", ".join(f"`{name}`" for name in named) or "no arguments by name"
            found.append(
                Diagnostic(
                    "error", "E103", f"the forward of `{kind}` has no argument `{spec.name}`", spec.span or request.span,
                    "no such argument", (f"it takes {takes}",), did_you_mean(spec.name, [n for n in named if n not in given]),
                )
            )  # fmt: skip
    misspelled = {closest(name, [n for n in named if n not in given]) for name in given if name not in named}
    missing = [name for name in lacking if name not in misspelled]
    if missing:
        listed = ", ".join(f"`{name}`" for name in missing)
        found.append(
            Diagnostic(
                "error", "E103", f"the forward of `{kind}` needs {listed}", request.span, "the plan has no such input",
                (), (f"input {missing[0]} : int64[batch, …]", "or give the argument a default in the model"),
            )
        )  # fmt: skip
    if found:
        raise failures.errors(found, request)


def check_loss(loss: Callable[..., Any] | None, request: CaptureRequest) -> None:
    """The loss function can be called with the model's output, the batch and its options."""
    if loss is None or request.loss is None:
        return
    name, options = request.loss
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, {}, **options)
    except TypeError as problem:
        raise failures.error(
            request, "E103", f"the loss function `{name}` does not fit: {problem}", f"it is {loss.__name__}{signature}",
            request.loss_span, help=("it is called as function(outputs, batch, **options), with the batch as a dict",),
        ) from None  # fmt: skip


def check_model(model: nn.Module, request: CaptureRequest) -> None:
    """Things that are wrong with a model before it runs: devices of its own, complex numbers, gradient hooks."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise failures.error(
                request, "E110", f"the model puts `{name}` on the device `{tensor.device}` itself", "this model",
                help=("leave devices out of the model: the plan and the runtime choose them",),
            )  # fmt: skip
        if tensor.is_complex():
            raise failures.error(request, "E125", f"`{name}` is complex", "in this model", help=failures.HELP["E125"][:1])
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise failures.error(
                request, "E126", f"a hook is registered on the gradient of `{name}`", "in this model",
                notes=failures.NOTES["E126"], help=("remove the hook, or do its work with operators that autograd knows",),
            )  # fmt: skip
    if not request.keep_outputs and request.train and not any(p.requires_grad for p in model.parameters()):
        count = sum(1 for _ in model.parameters())
        why = f"all its {count} parameters are frozen (requires_grad is false)" if count else "it has no parameters"
        raise failures.error(request, "E105", "nothing in the model learns", why)


def check_names(names: Mapping[str, str], request: CaptureRequest) -> None:
    """An input and a tensor of the model cannot have one name."""
    for spec in request.inputs:
        if spec.name in names:
            raise failures.error(
                request, "E103", f"`{spec.name}` is both an input and a tensor that the model holds", "this input",
                spec.span, help=("rename one of them in the model",),
            )  # fmt: skip


def check_patterns(model: nn.Module, request: CaptureRequest) -> None:
    """Every pattern means something."""
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    modules = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    found = []
    asked = {"freeze": request.freeze, "opaque": request.opaque, **request.named}
    for word, patterns in asked.items():
        names = [*parameters, *modules] if word == "freeze" else modules
        for pattern in patterns:
            text = getattr(pattern, "text", pattern)
            if text != "*" and not any(fnmatchcase(name, text) for name in names):
                found.append(
                    Diagnostic(
                        "error", "E106", f"`{word}` names nothing in the model: \"{text}\"",
                        getattr(pattern, "span", None) or request.span, "fits no name", (), did_you_mean(text, names),
                    )
                )  # fmt: skip
    if found:
        raise failures.errors(found, request)


ONE_DTYPE = """
    aten.linear aten.matmul aten.mm aten.bmm aten.addmm aten.baddbmm aten.addbmm aten.addmv aten.mv aten.dot aten.conv1d
    aten.conv2d aten.conv3d aten.convolution aten.conv_transpose1d aten.conv_transpose2d aten.conv_transpose3d
    aten.bilinear planc.attention
""".split()

FILLS = {"aten.masked_fill.Scalar": 2, "aten.full.default": 1}
"""Operators that write a number, and which argument it is."""
LARGEST = torch.finfo(torch.float16).max


def check_dtypes(graph: Graph) -> None:
    """Products have operands of one dtype, and what is filled in fits its dtype, as eager insists (tracing does not);
    nothing is complex."""
    for node in graph.nodes:
        check_fill(node)
        if any(out is not None and out.dtype.startswith("complex") for out in node.outputs):
            raise Unsupported("complex numbers", node.origin, "E125")
        if node.op.rpartition(".")[0] in ONE_DTYPE or node.op in ONE_DTYPE:
            operands = values_in(node.args[:4] if node.op == "planc.attention" else node.args)
            dtypes = dict.fromkeys(value.dtype for value in operands if value.dtype != "bool")
            if len(dtypes) > 1:
                name = node.op.split(".")[1]
                raise Unsupported(f"`{name}` gets operands of different dtypes: {', '.join(dtypes)}", node.origin, "E110")


def check_fill(node: Node) -> None:
    out, at = node.outputs[0], FILLS.get(node.op)
    if at is None or out is None or out.dtype != "float16":
        return
    number = node.args[at]
    if LARGEST < abs(number) < math.inf:
        what = f"`{node.op.split('.')[1]}` writes {number:g} into float16, which ends at {LARGEST:g}"
        raise Unsupported(what, node.origin, "E110", help="fill in `torch.finfo(x.dtype).min`, or float('-inf')")


SAME_VALUES = ("aten.view.", "aten.expand.", "aten.permute.", "aten.detach.", "planc.cast")
"""Operators whose result has the values of their first argument, all of them."""


def check_positions(graph: Graph) -> None:
    """Counted positions are rows of the table that they read. Eager fails there; a table that is cut by rows would give
    zeros, as each rank does for the rows of others."""
    makers = {out: node for node in graph.nodes for out in node.outputs}
    for node in graph.nodes:
        if node.op != "aten.embedding.default":
            continue
        maker = makers.get(node.args[1])
        while maker is not None and maker.op.startswith(SAME_VALUES):
            maker = makers.get(maker.args[0])
        if maker is None or maker.op != "aten.arange.start_step":
            continue
        first, end, step = maker.args[:3]
        positions, rows = range(int(first), int(end), int(step)), node.args[0].shape[0]
        if positions and (max(positions) >= rows or min(positions) < 0):
            beyond = max(positions) if max(positions) >= rows else min(positions)
            what = f"`embedding` looks up row {beyond} of a table of {rows} rows"
            raise Unsupported(what, node.origin, "E110", help="make the table longer, or the sequences of the plan shorter")


def check_learns(graph: Graph, model: nn.Module, request: CaptureRequest) -> None:
    """The loss has a gradient."""
    loss = graph.outputs.get("loss")
    if loss is None or loss.differentiable or not request.train:
        return
    frozen = [name for name, p in model.named_parameters() if p.requires_grad]
    why = "the plan freezes every parameter that would learn"
    if any(value.kind == "param" and value.differentiable for value in graph.inputs):
        why = "the loss does not depend on any parameter through differentiable operators"
    raise failures.error(
        request, "E105", "nothing in the model learns", why if frozen else "no parameter requires a gradient",
        help=("is the loss computed under `torch.no_grad()`, or from `argmax`, or detached?",) if "loss" in why else (),
        place=failures.place_of(loss.producer.origin) if loss.producer is not None else None,
    )  # fmt: skip


def loss_hints(model: nn.Module, request: CaptureRequest) -> Sequence[str]:
    """Why there may be no loss: an input that forward does not know by name, or one that it would take."""
    named, _, takes_any = forward_arguments(model)
    given = [spec.name for spec in request.inputs]
    hints = []
    for name in given:
        near = closest(name, [n for n in named if n not in given])
        if takes_any and name not in named:
            hints.append(f"forward has no argument named `{name}`" + (f": did you mean `{near}`?" if near else ""))
    for name in ("labels", "targets", "target"):
        if name in named and name not in given and not hints:
            hints.append(f"its forward takes `{name}`, which the plan does not give: input {name} : int64[…]")
    return hints
