"""Softmax, its logarithm and log-sum-exp along a dimension that is cut: what the ranks exchange are maxima and sums.

With l = log Σ exp(x) over all ranks, log softmax(x) = x - l is local. Its gradient needs one sum over the ranks:

    dx = g - softmax(x) Σ g          for the logarithm
    dx = y (g - Σ g y)               for y = softmax(x)
    dx = g softmax(x)                for l, whose gradient is the same on all ranks

The gradient of padding is zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiler.autodiff.local import held_cut_text
from compiler.autodiff.operators import backward, forward
from compiler.ir.graph import Node, Value
from compiler.layout.placement import Layout, Shard, is_padded
from compiler.layout.rules.signature import arguments

if TYPE_CHECKING:
    from compiler.autodiff.trace import Tracer

LOGARITHMS = ("aten.log_softmax.int", "aten._log_softmax.default")
SOFTMAX = ("aten.softmax.int", "aten._softmax.default")


def _over(tracer: Tracer, node: Node) -> tuple[int, tuple[str, ...]]:
    """The dimension, and the axes that cut it."""
    value, dim = node.args[0], arguments(node)["dim"]
    dim = (dim[0] if isinstance(dim, tuple) else dim) % max(len(value.shape), 1)
    layout = value.layout or Layout()
    sizes = tracer.mesh.size
    return dim, tuple(a for a in tracer.mesh.names if layout[a] == Shard(dim) and sizes(a) > 1)


def _log_sum_exp(tracer: Tracer, value: Value, operand: torch.Tensor, dim: int, axes: tuple[str, ...]) -> torch.Tensor:
    """[…, 1, …] of `operand`, which is cut as `value`; at least in float32."""
    shape = list(operand.shape)
    shape[dim] = 1
    made = tracer.recorder.empty(tuple(shape), torch.promote_types(operand.dtype, torch.float32))
    cut = held_cut_text(value, axes, tracer.mesh)
    return tracer.recorder.add("planc.log_sum_exp", (tracer.recorder.value_of(operand), cut), made)


def _dtype(value: Value) -> torch.dtype:
    return getattr(torch, value.dtype)


def _summed(tracer: Tracer, tensor: torch.Tensor, dim: int, axes: tuple[str, ...]) -> torch.Tensor:
    local = tensor.sum(dim, keepdim=True)
    made = tracer.recorder.empty(tuple(local.shape), local.dtype)
    return tracer.recorder.add("planc.all_reduce", (tracer.recorder.value_of(local), axes, "sum"), made)


def _unpadded(tracer: Tracer, value: Value, gradient: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    shard = (value.layout or Layout())[axes[0]]
    assert isinstance(shard, Shard)
    if not is_padded(value.shape, value.layout or Layout(), shard, tracer.mesh):
        return gradient
    cut, count = held_cut_text(value, axes, tracer.mesh), value.shape[shard.dim]
    made = tracer.recorder.empty(tuple(gradient.shape), gradient.dtype)
    return tracer.recorder.add("planc.mask", (tracer.recorder.value_of(gradient), cut, count, "sum"), made)


@forward("aten.logsumexp.default")
def log_sum_exp(tracer: Tracer, node: Node) -> torch.Tensor:
    dim, axes = _over(tracer, node)
    if not axes:
        return tracer.call(node)
    found = _log_sum_exp(tracer, node.args[0], tracer.tensor(node.args[0]), dim, axes).to(_dtype(node.outputs[0]))
    return found if arguments(node)["keepdim"] else found.squeeze(dim)


@backward("aten.logsumexp.default")
def log_sum_exp_backward(tracer: Tracer, node: Node, gradients: list) -> dict[Value, torch.Tensor] | None:
    dim, axes = _over(tracer, node)
    if not axes:
        return None
    value, gradient, found = node.args[0], gradients[0], tracer.results[node][0]
    if not arguments(node)["keepdim"]:
        gradient, found = gradient.unsqueeze(dim), found.unsqueeze(dim)
    softmax = (tracer.tensor(value) - found.detach()).exp()
    return {value: _unpadded(tracer, value, (softmax * gradient).to(_dtype(value)), axes)}


def softmax(tracer: Tracer, node: Node) -> torch.Tensor:
    dim, axes = _over(tracer, node)
    if not axes:
        return tracer.call(node)
    (value, *_), (out,) = node.args, node.outputs
    operand = tracer.tensor(value).to(_dtype(out))
    logarithm = operand - _log_sum_exp(tracer, value, operand, dim, axes)
    return (logarithm if node.op in LOGARITHMS else logarithm.exp()).to(_dtype(out))


def softmax_backward(tracer: Tracer, node: Node, gradients: list) -> dict[Value, torch.Tensor] | None:
    dim, axes = _over(tracer, node)
    if not axes:
        return None
    value, gradient, found = node.args[0], gradients[0], tracer.results[node][0].detach()
    if node.op in LOGARITHMS:
        result = gradient - found.exp() * _summed(tracer, gradient, dim, axes)
    else:
        result = found * (gradient - _summed(tracer, gradient * found, dim, axes))
    return {value: _unpadded(tracer, value, result.to(_dtype(value)), axes)}


for _op in (*LOGARITHMS, *SOFTMAX):
    forward(_op)(softmax)
    backward(_op)(softmax_backward)
