"""planc's own operators on one rank: how each is recorded, and its transpose.

The transposes of the redistributions follow from the placements alone (see `compiler.layout.placement`): the gradient
of `S` is `S`, of `R` is `R`, of `V` is a partial sum, of `P` is `V`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from compiler.autodiff.local import cut_text, cuts_text, held_cut_text, shape_of
from compiler.ir.graph import Node, Value, values_in
from compiler.layout.placement import Replicate, Shard
from compiler.layout.rules.signature import arguments

if TYPE_CHECKING:
    from compiler.autodiff.trace import Tracer

Forward = Callable[["Tracer", Node], Any]
Backward = Callable[["Tracer", Node, list[torch.Tensor | None]], dict[Value, torch.Tensor]]
FORWARD: dict[str, Forward] = {}
BACKWARD: dict[str, Backward] = {}


def forward(op: str) -> Callable[[Forward], Forward]:
    return lambda function: FORWARD.setdefault(op, function)


def backward(op: str) -> Callable[[Backward], Backward]:
    return lambda function: BACKWARD.setdefault(op, function)


def _cut(tracer: Tracer, node: Node) -> str:
    """The cut that a redistribution makes or undoes; its order is that of the value that has it."""
    places = [value.layout[node.args[1][0]] for value in (node.args[0], node.outputs[0])]
    order = next((place.order for place in places if isinstance(place, Shard)), "")
    return cut_text(*node.args[1:6], tracer.mesh, order)


def _record(tracer: Tracer, node: Node, op: str, *args: Any) -> torch.Tensor:
    """Record `op(x, *args)` with the result shape of the node's output."""
    out = node.outputs[0]
    assert out is not None
    return _made(tracer, op, (tracer.value(node.args[0]), *args), shape_of(out, tracer.mesh), out.dtype)


def _made(tracer: Tracer, op: str, args: tuple, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return tracer.recorder.add(op, args, tracer.recorder.empty(shape, dtype))


def _like(tracer: Tracer, node: Node, gradient: torch.Tensor, op: str, *args: Any) -> dict[Value, torch.Tensor]:
    """The gradient of the node's first operand: `op(gradient, *args)`."""
    value = node.args[0]
    arguments = (tracer.recorder.value_of(gradient), *args)
    return {value: _made(tracer, op, arguments, shape_of(value, tracer.mesh), value.dtype)}


# -- redistributions -------------------------------------------------------------------------------------------------


@forward("planc.vary")
@forward("planc.alias")
def identity(tracer: Tracer, node: Node) -> torch.Tensor:
    return tracer.tensor(node.args[0])


@backward("planc.alias")
@backward("planc.all_reduce")
def identity_backward(tracer: Tracer, node: Node, gradients: list) -> dict[Value, torch.Tensor]:
    return {node.args[0]: gradients[0]}


@backward("planc.vary")
def vary_backward(tracer: Tracer, node: Node, gradients: list) -> dict[Value, torch.Tensor]:
    axes = tuple(axis for axis in node.args[1] if tracer.mesh.size(axis) > 1)
    if not axes:
        return {node.args[0]: gradients[0]}
    return _like(tracer, node, gradients[0], "planc.all_reduce", axes, "sum")


@forward("planc.all_reduce")
def all_reduce(tracer: Tracer, node: Node) -> torch.Tensor:
    axes = tuple(axis for axis in node.args[1] if tracer.mesh.size(axis) > 1)
    return _record(tracer, node, "planc.all_reduce", axes, node.args[2])


@forward("planc.all_gather")
def all_gather(tracer: Tracer, node: Node) -> torch.Tensor:
    return _record(tracer, node, "planc.all_gather", _cut(tracer, node))


@backward("planc.all_gather")
def all_gather_backward(tracer: Tracer, node: Node, gradients: list) -> dict[Value, torch.Tensor]:
    whole = node.outputs[0].layout[node.args[1][0]]
    op = "planc.shard" if isinstance(whole, Replicate) else "planc.reduce_scatter"
    return _like(tracer, node, gradients[0], op, _cut(tracer, node), True)  # a gradient has zeros in the padding


@forward("planc.reduce_scatter")
def reduce_scatter(tracer: Tracer, node: Node) -> torch.Tensor:
    return _record(tracer, node, "planc.reduce_scatter", _cut(tracer, node))


@backward("planc.reduce_scatter")
def reduce_scatter_backward(tracer: Tracer, node: Node, gradients: list) -> dict[Value, torch.Tensor]:
    return _like(tracer, node, gradients[0], "planc.all_gather", _cut(tracer, node))


@forward("planc.shard")
def shard(tracer: Tracer, node: Node) -> torch.Tensor:
    return _record(tracer, node, "planc.shard", _cut(tracer, node))


@backward("planc.shard")
def shard_backward(tracer: Tracer, node: Node, gradients: list) -> dict[Value, torch.Tensor]:
    whole = node.args[0].layout[node.args[1][0]]
    op = "planc.all_gather" if isinstance(whole, Replicate) else "planc.unshard"
    return _like(tracer, node, gradients[0], op, _cut(tracer, node))


@forward("planc.first")
def first(tracer: Tracer, node: Node) -> torch.Tensor:
    return _record(tracer, node, "planc.first", node.args[1])


@backward("planc.first")
def first_backward(tracer: Tracer, node: Node, gradients: list) -> dict[Value, torch.Tensor]:
    return _like(tracer, node, gradients[0], "planc.first", node.args[1])


@forward("planc.all_to_all")
def all_to_all(tracer: Tracer, node: Node) -> torch.Tensor:
    return _record(tracer, node, "planc.all_to_all", *_cuts(tracer, node))


def _cuts(tracer: Tracer, node: Node) -> tuple[str, str]:
    """The cuts before and after an all_to_all."""
    before, after = (held_cut_text(value, (node.args[1],), tracer.mesh) for value in (node.args[0], node.outputs[0]))
    return before, after


@backward("planc.all_to_all")
def all_to_all_backward(tracer: Tracer, node: Node, gradients: list) -> dict[Value, torch.Tensor]:
    before, after = _cuts(tracer, node)
    return _like(tracer, node, gradients[0], "planc.all_to_all", after, before, True)


@forward("planc.mask")
def mask(tracer: Tracer, node: Node) -> torch.Tensor:
    return _record(tracer, node, "planc.mask", _cut(tracer, node), *node.args[6:])


@backward("planc.mask")
def mask_backward(tracer: Tracer, node: Node, gradients: list) -> dict[Value, torch.Tensor]:
    return _like(tracer, node, gradients[0], "planc.mask", _cut(tracer, node), node.args[6], "sum")


# -- computation -------------------------------------------------------------------------------------------------------


@forward("planc.cast")
def cast(tracer: Tracer, node: Node) -> torch.Tensor:
    return tracer.tensor(node.args[0]).to(getattr(torch, node.args[1].removeprefix("torch.")))


def _class_cut(tracer: Tracer, node: Node) -> str | None:
    """The cut of the classes of a loss, if they are cut; one of the leading dimensions is the batch's."""
    logits, target = node.args[:2]
    dim = 1 if len(logits.shape) > 1 else 0
    axes = tuple(a for a in tracer.mesh.names if isinstance(p := logits.layout[a], Shard) and p.dim == dim)
    if not axes or len(target.shape) == len(logits.shape):
        return None
    return held_cut_text(logits, axes, tracer.mesh)


@forward("planc.cross_entropy")
def cross_entropy(tracer: Tracer, node: Node) -> torch.Tensor:
    """torch's own where every rank has all classes, else one operator that exchanges maxima and sums."""
    logits, target, weight, ignore_index, smoothing = node.args
    cut = _class_cut(tracer, node)
    if cut is not None:
        out = node.outputs[0]
        shape = shape_of(out, tracer.mesh)
        wide = "float32" if out.dtype in ("bfloat16", "float16") else out.dtype
        results = (tracer.recorder.empty(shape, out.dtype), tracer.recorder.empty(shape, wide))
        operands = [tracer.value(item) if isinstance(item, Value) else None for item in (logits, target, weight)]
        return tracer.recorder.add("planc.cross_entropy", (*operands, ignore_index, smoothing, cut), results)[0]
    tensors = [tracer.tensor(item) if isinstance(item, Value) else None for item in (logits, target, weight)]
    return torch.nn.functional.cross_entropy(
        tensors[0], tensors[1], tensors[2], reduction="none", ignore_index=ignore_index, label_smoothing=smoothing
    )


@backward("planc.cross_entropy")
def cross_entropy_backward(tracer: Tracer, node: Node, gradients: list) -> dict[Value, torch.Tensor] | None:
    if _class_cut(tracer, node) is None:
        return None
    recorder = tracer.recorder
    logits = node.args[0]
    made = recorder.value_of(tracer.results[node][0]).producer
    operands, rest = made.args[:3], made.args[3:]
    arguments = (recorder.value_of(gradients[0]), *operands, made.outputs[1], *rest)
    result = recorder.empty(shape_of(logits, tracer.mesh), logits.dtype)
    return {logits: recorder.add("planc.cross_entropy_backward", arguments, result)}


@forward("planc.rows")
def rows(tracer: Tracer, node: Node) -> torch.Tensor:
    """The number of elements that a mean runs over, counting only real rows of the batch."""
    out = node.outputs[0]
    return _made(tracer, "planc.rows", (*node.args, f"torch.{out.dtype}"), (), out.dtype)


def _dropout_mask(tracer: Tracer, value: Value, p: float, site: int) -> torch.Tensor:
    local = shape_of(value, tracer.mesh)
    return _made(tracer, "planc.dropout_mask", (local, value.shape, cuts_text(value, tracer.mesh), p, site), local, "bool")


@forward("planc.dropout")
def dropout(tracer: Tracer, node: Node) -> torch.Tensor:
    value, p, site = node.args
    keep = _dropout_mask(tracer, value, p, site)
    return tracer.tensor(value) * keep * (1.0 / (1.0 - p))


@forward("planc.attention")
def attention(tracer: Tracer, node: Node) -> torch.Tensor:
    """One kernel with its log-sum-exp, or the operator that works block by block."""
    given = arguments(node)
    query = given["query"]
    out = node.outputs[0]
    shape = shape_of(out, tracer.mesh)
    wide = "float32" if out.dtype in ("bfloat16", "float16") else out.dtype
    results = (tracer.recorder.empty(shape, out.dtype), tracer.recorder.empty(shape[:-1], wide))

    def local(name: str) -> Value | None:
        return tracer.value(given[name]) if isinstance(given[name], Value) else None

    operands = [local(name) for name in ("query", "key", "value", "mask")]
    if not by_blocks(node):
        return tracer.recorder.add("planc.attention", (*operands, given["causal"], given["scale"]), results)[0]
    weights = (*query.shape[:-1], given["key"].shape[-2])
    call = (given["causal"], given["window"], given["scale"], given["dropout_p"], given["site"], weights)
    cuts = (cuts_text(query, tracer.mesh), cuts_text(given["key"], tracer.mesh, len(query.shape) - 2))
    return tracer.recorder.add("planc.attention_blocks", (*operands, local("documents"), *call, *cuts), results)[0]


def by_blocks(node: Node) -> bool:
    """Whether a kernel of the whole cannot serve: dropout on the weights, a bias that learns, a window, documents, or a
    sequence of which this rank has a part."""
    given = arguments(node)
    query, key, mask = given["query"], given["key"], given["mask"]
    learns = isinstance(mask, Value) and mask.differentiable
    sequence = len(query.shape) - 2
    places = [place for value in (query, key) for place in (value.layout or {}).values()]
    cut = any(isinstance(place, Shard) and place.dim == sequence for place in places)
    return given["dropout_p"] > 0 or learns or given["window"] is not None or given["documents"] is not None or cut


@backward("planc.attention")
def attention_backward(tracer: Tracer, node: Node, gradients: list) -> dict[Value, torch.Tensor] | None:
    given = arguments(node)
    mask = given["mask"]
    recorder = tracer.recorder
    made = recorder.value_of(tracer.results[node][0]).producer
    wanted = [given[name] for name in ("query", "key", "value")]
    learns = isinstance(mask, Value) and mask.differentiable
    results = tuple(recorder.empty(operand.shape, operand.dtype) for operand in made.args[: 4 if learns else 3])
    gradient = recorder.value_of(gradients[0])
    if by_blocks(node):
        rest = (*made.args[:5], *made.outputs, learns, *made.args[5:])
    else:
        rest = (*made.args[:4], *made.outputs, *made.args[4:])
    results = recorder.add(f"{made.op}_backward", (gradient, *rest), results)
    found: dict[Value, torch.Tensor] = {}
    for item, gradient in zip([*wanted, mask] if learns else wanted, results):
        if item.differentiable:
            found[item] = found[item] + gradient if item in found else gradient
    return found


# -- opaque modules ------------------------------------------------------------------------------------------------------


@forward("planc.opaque")
def opaque(tracer: Tracer, node: Node) -> Any:
    """Runs as it is; the runtime differentiates it by autograd, from a graph that it keeps in a token."""
    path, inputs, state, described = node.args
    operands = tuple(tracer.value(value) for value in (*inputs, *state))
    results = [
        None if out is None else tracer.recorder.empty(shape_of(out, tracer.mesh), out.dtype) for out in node.outputs
    ]
    token = tracer.recorder.empty((), "int64")
    wanted = tuple(value.differentiable for value in values_in(node.args))
    arguments = (path, described, operands, wanted)
    return tracer.recorder.add("planc.opaque", arguments, (*results, token))[:-1]


@backward("planc.opaque")
def opaque_backward(tracer: Tracer, node: Node, gradients: list) -> dict[Value, torch.Tensor]:
    recorder = tracer.recorder
    made = next(recorder.value_of(tensor).producer for tensor in tracer.results[node] if tensor is not None)
    wanted = [value for value in values_in(node.args) if value.differentiable]
    results = tuple(recorder.empty(shape_of(value, tracer.mesh), value.dtype) for value in wanted)
    given = tuple(None if g is None else recorder.value_of(g) for g in gradients)
    arguments = (node.args[0], made.outputs[-1], given)
    return dict(zip(wanted, recorder.add("planc.opaque_backward", arguments, results)))
