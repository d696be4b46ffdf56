"""Differentiation of a segment: its graph with layouts → local forward and backward code.

Forward, each node runs on fake tensors of local shapes, as a small autograd graph of its own. Backward, in reverse
order, each node's gradients are asked of autograd (or of the node's own transpose, for planc's operators), under the
same recorder. So every recorded operator knows the node it comes from, and gradients have the layouts that the
pairing in `compiler.layout.placement` gives them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import compiler.autodiff.lookup
import compiler.autodiff.softmax  # noqa: F401  (they register operators)
from compiler.autodiff.local import localized, shape_of
from compiler.autodiff.operators import BACKWARD, FORWARD
from compiler.autodiff.recorder import Recorder
from compiler.autodiff.simplify import simplify
from compiler.ir.graph import Graph, Node, Value, map_values
from compiler.layout.placement import Mesh


@dataclass
class Recorded:
    """A segment's local code, before partitioning into what is saved and what is recomputed.

    `arguments`, `results` and `gradients` hold local values. `gradients[k]` is the gradient of argument k, None where
    there is none; `writes`: the code writes into memory that it has views of, so its order must stay; `cotangents[k]` that of result k, None where nobody gives one.
    """

    arguments: list[Value]
    forward: list[Node]
    results: list[Value]
    cotangents: list[Value | None]
    backward: list[Node]
    gradients: list[Value | None]
    layouts: dict[Value, Value] = field(default_factory=dict)
    writes: bool = False


class Tracer:
    """The state of one tracing: which fake tensor stands for which value of the segment's graph."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.recorder = Recorder()
        self.tensors: dict[Value, torch.Tensor] = {}
        self.results: dict[Node, list[torch.Tensor | None]] = {}

    def tensor(self, value: Value) -> torch.Tensor:
        return self.tensors[value]

    def value(self, value: Value) -> Value:
        """The local value that stands for a value of the graph."""
        return self.recorder.value_of(self.tensors[value])

    def call(self, node: Node) -> Any:
        """Run an ATen operator on the fake tensors, with local arguments."""
        op, args, kwargs = localized(node, self.mesh)

        def real(argument: Any) -> Any:
            if isinstance(argument, str) and argument.startswith("torch."):
                return getattr(torch, argument.removeprefix("torch."))
            if isinstance(argument, tuple):
                return [real(item) for item in argument]
            return argument

        if not node.inputs:
            kwargs = {**kwargs, **created(op, node)}
        args, kwargs = map_values((args, kwargs), self.tensor)
        return operator(op)(*[real(item) for item in args], **{key: real(item) for key, item in kwargs.items()})


def trace(graph: Graph, mesh: Mesh, with_gradient: Sequence[bool]) -> Recorded:
    """Local code of `graph`; `with_gradient[k]`: output k gets a cotangent (in the order of `graph.outputs`)."""
    with torch.enable_grad():
        return _trace(graph, mesh, with_gradient)


def _trace(graph: Graph, mesh: Mesh, with_gradient: Sequence[bool]) -> Recorded:
    tracer = Tracer(mesh)
    recorder = tracer.recorder
    arguments = []
    for value in graph.inputs:
        local = Value(recorder.fresh(value.name), value.dtype, shape_of(value, mesh), value.kind)
        tracer.tensors[value] = recorder.tensor(local, local.shape)
        arguments.append(local)
    leaves = {node: run_node(tracer, node) for node in graph.nodes}
    outputs = list(graph.outputs.values())
    results = [recorder.value_of(contiguous(tracer, tracer.tensor(value))) for value in outputs]
    forward, recorder.nodes = recorder.nodes, []

    gradients: dict[Value, torch.Tensor] = {}
    cotangents: list[Value | None] = []
    for value, wanted in zip(outputs, with_gradient):
        if not (wanted and value.differentiable):
            cotangents.append(None)
            continue
        local = Value(recorder.fresh(f"d_{value.name}"), value.dtype, shape_of(value, mesh), "cotangent")
        tensor = recorder.tensor(local, local.shape)
        cotangents.append(local)
        accumulate(tracer, gradients, value, tensor)
    for node in reversed(graph.nodes):
        differentiate_node(tracer, node, leaves[node], gradients)
    found: list[Value | None] = []
    for value in graph.inputs:
        given = gradients.get(value) if value.differentiable else None
        if given is not None and value.kind != "param":
            given = contiguous(tracer, given)
        found.append(None if given is None else recorder.value_of(given))
    meaning = {tracer.value(value): value for value in graph.values()}
    if recorder.writes:  # equal operators on memory that is written are not the same
        backward, env = recorder.nodes, {}
    else:
        forward, env = simplify(forward)
        backward, env = simplify(recorder.nodes, env)
    now = [None if value is None else env.get(value, value) for value in found]
    return Recorded(arguments, forward, [env.get(v, v) for v in results], cotangents, backward, now, meaning, recorder.writes)


def contiguous(tracer: Tracer, tensor: torch.Tensor) -> torch.Tensor:
    """What passes between segments is contiguous: each is traced without knowing the strides of the others."""
    if tensor.is_contiguous():
        return tensor
    with tracer.recorder:
        return tensor.contiguous()


def run_node(tracer: Tracer, node: Node) -> dict[Value, torch.Tensor]:
    """Record the node forward; its operands become leaves of an autograd graph that holds just this node."""
    recorder = tracer.recorder
    before = dict(tracer.tensors)
    leaves = {
        value: recorder.leaf(tracer.tensors[value], value.differentiable) for value in dict.fromkeys(node.inputs)
    }
    tracer.tensors.update(leaves)
    base = next((out.name for out in node.outputs if out is not None), "v")
    with recorder.at(node, base.split(".")[0]):
        with recorder:
            result = FORWARD[node.op](tracer, node) if node.op in FORWARD else tracer.call(node)
    tracer.tensors = before
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    tracer.results[node] = results
    for out, tensor in zip(node.outputs, results):
        if out is not None:
            tracer.tensors[out] = tensor
    return leaves


def created(op: str, node: Node) -> dict[str, Any]:
    """What makes an operator that creates a tensor independent of defaults: its dtype, and the rank's own device (which
    the recorder writes down as such, whatever it is here)."""
    names = {argument.name for argument in operator(op)._schema.arguments}
    out = node.outputs[0]
    assert out is not None
    found: dict[str, Any] = {"device": torch.device("cpu")} if "device" in names else {}
    if "dtype" in names and "dtype" not in node.kwargs:
        found["dtype"] = f"torch.{out.dtype}"
    return found


def operator(name: str) -> Any:
    """The torch operator called "aten.linear.default". A view is a `reshape` here: local parts may be strided."""
    if name == "aten.view.default":
        return torch.ops.aten.reshape.default
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def differentiate_node(
    tracer: Tracer, node: Node, leaves: Mapping[Value, torch.Tensor], gradients: dict[Value, torch.Tensor]
) -> None:
    """Turn the gradients of the node's outputs into gradients of its inputs."""
    recorder = tracer.recorder
    given = [gradients.get(out) if out is not None else None for out in node.outputs]
    wanted = [value for value in leaves if value.differentiable]
    if not wanted or all(gradient is None for gradient in given):
        return
    with recorder.at(node, f"d_{wanted[0].name.rsplit('.', 1)[0]}"), recorder:
        found = BACKWARD[node.op](tracer, node, given) if node.op in BACKWARD else None
        if found is None:
            pairs = [(t, g) for t, g in zip(tracer.results[node], given) if g is not None and t.requires_grad]
            if not pairs:
                return
            tensors, cotangents = zip(*pairs)
            inputs = [leaves[value] for value in wanted]
            results = torch.autograd.grad(tensors, inputs, cotangents, allow_unused=True)
            found = {value: gradient for value, gradient in zip(wanted, results) if gradient is not None}
    for value, gradient in found.items():
        with recorder.at(node, f"d_{value.name}"):
            accumulate(tracer, gradients, value, gradient)


def accumulate(tracer: Tracer, gradients: dict[Value, torch.Tensor], value: Value, gradient: torch.Tensor) -> None:
    if value in gradients:
        with tracer.recorder:
            gradient = gradients[value] + gradient
    gradients[value] = gradient
