"""Compare a graph under layouts, on all ranks, with the same graph on one: results and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compiler.ir.graph import Graph, Node, Value, map_values
from compiler.ir.text import print_graph
from compiler.ir.verify import verify_graph
from compiler.layout.placement import Layout, Mesh
from compiler.layout.propagate import Propagation, propagate
from tests.layout.simulate import Simulator, assemble, distribute, dual, evaluate


@dataclass
class Program:
    """A graph while it is built, with what every value is on one device."""

    graph: Graph = field(default_factory=lambda: Graph("g"))
    tensors: dict[Value, Tensor] = field(default_factory=dict)

    def input(self, tensor: Tensor, kind: str = "slot") -> Value:
        """A floating tensor is one that a gradient is wanted of, unless it says otherwise."""
        value = Value(f"in{len(self.graph.inputs)}", dtype_name(tensor), tuple(tensor.shape), kind)
        value.differentiable = tensor.requires_grad
        self.graph.inputs.append(value)
        self.tensors[value] = tensor
        return value

    def call(self, op: str, *args: Any, **kwargs: Any) -> list[Value | None]:
        given, named = map_values((args, kwargs), self.tensors.__getitem__)
        results = reference(op, args, given, named)
        node = Node(op, args, kwargs, [])
        for k, tensor in enumerate(results):
            name = f"v{len(self.graph.nodes)}_{k}"
            out = Value(name, dtype_name(tensor), tuple(tensor.shape), "", tensor.requires_grad, producer=node)
            self.tensors[out] = tensor
            node.outputs.append(out)
        self.graph.nodes.append(node)
        self.graph.outputs = {out.name: out for out in node.outputs if out is not None}
        return node.outputs


def reference(op: str, args: Sequence[Any], given: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
    if op == "planc.count":
        value, dims = given
        return [torch.tensor(float(torch.tensor([value.shape[dim] for dim in dims]).prod()), dtype=value.dtype)]
    return evaluate(op, tuple(given), named)


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check(program: Program, mesh: Mesh, layouts: Mapping[Value, Layout]) -> Propagation:
    """Assert that the graph's outputs, and the gradients of its inputs, are the same under these layouts."""
    found = propagate(program.graph, mesh, layouts)
    verify_graph(found.graph)
    try:
        _compare(program, found, mesh)
    except Exception as error:
        raise AssertionError(f"{error}\non mesh {mesh.axes}\n{print_graph(found.graph)}") from error
    return found


def _compare(program: Program, found: Propagation, mesh: Mesh) -> None:
    inputs: dict[Value, list[Tensor]] = {}
    for old in program.graph.inputs:
        new, tensor = found.values[old], program.tensors[old].detach()
        inputs[new] = [part.requires_grad_(old.differentiable) for part in distribute(tensor, new.layout, mesh)]
    parts = Simulator(found.graph, mesh).run(inputs)
    for old in program.graph.outputs.values():
        new = found.values[old]
        whole = assemble([part.detach() for part in parts[new]], new.shape, new.layout, mesh)
        torch.testing.assert_close(whole, program.tensors[old].detach(), equal_nan=True)

    learn = [value for value in program.graph.inputs if value.differentiable]
    outs = [value for value in program.graph.outputs.values() if value.differentiable]
    if not learn or not outs:
        return
    seeds = [torch.randn_like(program.tensors[value]) for value in outs]
    expected = gradients([program.tensors[v] for v in outs], [program.tensors[v] for v in learn], seeds)
    tensors = [part for out in outs for part in parts[found.values[out]]]
    local_seeds = [
        part
        for out, seed in zip(outs, seeds)
        for part in distribute(seed, dual(found.values[out].layout, mesh), mesh, gradient=True)
    ]
    leaves = [part for value in learn for part in inputs[found.values[value]]]
    flat = gradients(tensors, leaves, local_seeds)
    ranks = len(leaves) // len(learn)
    for k, value in enumerate(learn):
        local = flat[k * ranks : (k + 1) * ranks]
        whole = assemble(local, value.shape, dual(found.values[value].layout, mesh), mesh, gradient=True)
        torch.testing.assert_close(whole, expected[k], equal_nan=True, msg=lambda m: f"gradient of {value.name}: {m}")


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor]:
    pairs = [(out, seed) for out, seed in zip(outputs, seeds) if out.requires_grad]
    if not pairs:
        return [torch.zeros_like(tensor) for tensor in inputs]
    found = torch.autograd.grad(
        [out for out, _ in pairs], inputs, [seed for _, seed in pairs], allow_unused=True, retain_graph=True
    )
    return [torch.zeros_like(tensor) if g is None else g for tensor, g in zip(inputs, found)]
