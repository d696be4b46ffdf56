"""What the lowering passes share: emitting nodes whose types torch infers, and replacing a call by other nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from compiler.ir.graph import Graph, Node, Origin, Value, map_values

CONSTANT = ("aten.detach.default", "planc.count")
"""What has no gradient with respect to its operand."""


class LoweringError(Exception):
    """A call that cannot keep its meaning in a plan; `help` says what to do instead, `asked` names the statement and the
    option of the plan because of which it cannot."""

    def __init__(self, node: Node, message: str, help: str = "", asked: tuple[str, str] | None = None):
        super().__init__(message)
        self.node, self.message, self.help, self.asked = node, message, help, asked


class Emitter:
    """Makes nodes with the origin of the call that they replace, and names made from its result's."""

    def __init__(self, node: Node, taken: set[str]):
        self.origin: Origin = node.origin
        self.base = next(out.name for out in node.outputs if out is not None)
        self.taken = taken
        self.nodes: list[Node] = []

    def __call__(self, op: str, *args: Any, **kwargs: Any) -> Value:
        """`op(*args, **kwargs)`; the type of the one result is what torch says for operands of these types."""
        with torch.device("meta"):
            made = _run(op, args, kwargs)
        return self.node(op, args, kwargs, tuple(made.shape), str(made.dtype).removeprefix("torch."))

    def node(self, op: str, args: tuple, kwargs: dict[str, Any], shape: tuple[int, ...], dtype: str) -> Value:
        node = Node(op, args, kwargs, [], self.origin)
        short = op.split(".")[1]
        name = next(n for k in range(len(self.taken) + 1) if (n := f"{self.base}.{short}{k or ''}") not in self.taken)
        self.taken.add(name)
        real = getattr(torch, dtype).is_floating_point
        learns = real and op not in CONSTANT and any(value.differentiable for value in node.inputs)
        value = Value(name, dtype, shape, differentiable=learns, producer=node)
        node.outputs = [value]
        self.nodes.append(node)
        return value

    # -- planc's own, and what is often needed -------------------------------------------------------------------

    def cast(self, value: Value, dtype: str) -> Value:
        if value.dtype == dtype:
            return value
        return self.node("planc.cast", (value, f"torch.{dtype}"), {}, value.shape, dtype)

    def wide(self, value: Value) -> Value:
        """In the precision in which sums are accumulated."""
        return self.cast(value, accumulation(value.dtype))

    def count(self, value: Value, dims: Sequence[int]) -> Value:
        """The number of real elements of `value` along `dims`, in its dtype."""
        return self.node("planc.count", (value, tuple(dims)), {}, (), value.dtype)

    def sum(self, value: Value, dims: Sequence[int], keepdim: bool = False) -> Value:
        return self("aten.sum.dim_IntList", value, tuple(dims), keepdim) if value.shape else value

    def mean(self, value: Value, dims: Sequence[int], keepdim: bool = False) -> Value:
        """Over real elements alone; `value` is in the precision that the mean is to be taken in."""
        return self("aten.div.Tensor", self.sum(value, dims, keepdim), self.count(value, dims))


def accumulation(dtype: str) -> str:
    """A sum of half-precision numbers is taken in float32: it may exceed their range where the mean does not."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def _run(op: str, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    namespace, packet, overload = op.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)

    def tensor(value: Value) -> torch.Tensor:
        return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")

    def plain(argument: Any) -> Any:
        if isinstance(argument, str) and argument.startswith("torch."):
            return getattr(torch, argument.removeprefix("torch."))
        return argument

    args, kwargs = map_values((args, kwargs), tensor)
    return function(*map(plain, args), **{key: plain(item) for key, item in kwargs.items()})


Lowering = Callable[[Node, Emitter], "Sequence[Value | None] | None"]


def replace_calls(graph: Graph, lower: Lowering) -> Graph:
    """Replace every call for which `lower` answers values for its results (None: the call stays)."""
    taken = {value.name for value in graph.values()}
    moved: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if moved:
            node.args, node.kwargs = map_values((node.args, node.kwargs), lambda value: moved.get(value, value))
        emit = Emitter(node, taken)
        results = lower(node, emit)
        if results is None:
            nodes.append(node)
            continue
        nodes += emit.nodes
        for out, new in zip(node.outputs, results):
            if out is None or new is None:
                continue
            moved[out] = new
            if new.producer in emit.nodes:
                new.name = out.name
    graph.nodes = nodes
    graph.outputs = {role: moved.get(value, value) for role, value in graph.outputs.items()}
    return graph
