"""Recording: run operators on fake tensors and write down what they do as IR nodes.

`Recorder` is a dispatch mode that sits below autograd, so it sees the operators that autograd's own formulas are made
of, forward and backward, in the order in which eager PyTorch would run them. Nothing is computed: the tensors are
fake ones with local shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from compiler.ir.graph import Node, Origin, Value

DROPPED = {"layout", "pin_memory", "non_blocking"}
ALIASES = {"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default"}


class Recorder(TorchDispatchMode):
    """Records into `nodes`. Tensors are known by identity; `value_of` and `bind` connect them to IR values."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.nodes: list[Node] = []
        self.origin = Origin()
        self.source: Node | None = None
        self.base = "v"
        self._values: dict[int, Value] = {}
        self._alive: list[torch.Tensor] = []  # so that no identity is reused
        self._names: dict[str, int] = {}
        self._making = False
        self.writes = False  # whether recorded code writes into memory that it has views of

    def empty(self, shape: tuple[int, ...], dtype: str | torch.dtype) -> torch.Tensor:
        """A fake tensor for the result of an operator that is recorded by `add`."""
        self._making = True
        try:
            with self.fake:
                return torch.empty(shape, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        finally:
            self._making = False

    def bind(self, tensor: torch.Tensor, value: Value) -> None:
        self._values[id(tensor)] = value
        self._alive.append(tensor)

    def value_of(self, tensor: torch.Tensor) -> Value:
        return self._values[id(tensor)]

    def fresh(self, base: str) -> str:
        count = self._names[base] = self._names.get(base, -1) + 1
        return base if count == 0 else f"{base}_{count}"

    def tensor(self, value: Value, shape: tuple[int, ...]) -> torch.Tensor:
        """A fake tensor that stands for `value`."""
        tensor = self.empty(shape, value.dtype)
        self.bind(tensor, value)
        return tensor

    def leaf(self, tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        """The same value as a leaf of a new autograd graph."""
        leaf = tensor.detach()
        if requires_grad:
            leaf.requires_grad_()
        self.bind(leaf, self.value_of(tensor))
        return leaf

    def add(self, op: str, args: tuple[Any, ...], result: torch.Tensor | tuple[torch.Tensor | None, ...]) -> Any:
        """Record one of planc's operators whose result tensors are made by the caller (None: nobody wants it)."""
        results = result if isinstance(result, tuple) else (result,)
        node = Node(op, args, {}, [], self.origin, self.source)
        node.outputs = [None if tensor is None else self._output(tensor, node) for tensor in results]
        self.nodes.append(node)
        return result

    def _output(self, tensor: torch.Tensor, node: Node) -> Value:
        dtype = str(tensor.dtype).removeprefix("torch.")
        value = Value(self.fresh(self.base), dtype, tuple(tensor.shape), producer=node)
        self.bind(tensor, value)
        return value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        with self.fake:
            result = func(*args, **kwargs)
        op = str(func)
        if self._making or op.startswith("prim."):
            return result
        if op in ALIASES:
            self.bind(result, self._known(args[0]))
            return result
        node = Node(op, self._encode(args), self._encode_kwargs(kwargs), [], self.origin, self.source)
        if func._schema.is_mutable:
            return self._record_mutation(func, node, args, kwargs, result)
        results = result if isinstance(result, (tuple, list)) else (result,)
        node.outputs = [self._output(item, node) if isinstance(item, torch.Tensor) else None for item in results]
        self.nodes.append(node)
        return result

    def _record_mutation(self, func: Any, node: Node, args: Any, kwargs: Any, result: Any) -> Any:
        """`x.op_()` on a tensor that nothing else sees becomes `y = op(x)`, with y in x's place.

        Where x is a view, or has views, the write is kept as it is: generated code runs in order and its tensors alias
        as these do. Every other value of the same memory goes on as `planc.after(value, y)`, the value as it is once
        y is written, so that the order shows in the graph.
        """
        written = _written(func, args, kwargs)
        memory = {tensor.untyped_storage()._cdata for tensor in written}
        seen = {
            id(value): value
            for tensor in self._alive
            if tensor.untyped_storage()._cdata in memory and (value := self._values[id(tensor)])
        }
        own = {id(self._known(tensor)) for tensor in written}
        if set(seen) == own and len(written) == 1 and written[0] is args[0] and str(func).split(".")[1].endswith("_"):
            node.op = _functional(func)
            node.outputs = [self._output(args[0], node)]
            self.nodes.append(node)
            return result
        self.writes = True
        before = [tensor for tensor in self._alive if tensor.untyped_storage()._cdata in memory]
        old = {id(tensor): self._values[id(tensor)] for tensor in before}
        node.outputs = [self._output(tensor, node) for tensor in written]
        self.nodes.append(node)
        now = {id(old[id(tensor)]): self._values[id(tensor)] for tensor in written if id(tensor) in old}
        for tensor in before:
            value = old[id(tensor)]
            if id(value) not in now:
                after = Node("planc.after", (value, node.outputs[0]), {}, [], self.origin, self.source)
                after.outputs = [Value(self.fresh(self.base), value.dtype, value.shape, value.kind, producer=after)]
                self.nodes.append(after)
                now[id(value)] = after.outputs[0]
            self._values[id(tensor)] = now[id(value)]
        return result

    def _known(self, tensor: torch.Tensor) -> Value:
        if id(tensor) not in self._values:
            # A number that an operator's formula turned into a tensor.
            raise AssertionError("a tensor of unknown origin entered a recorded operator")
        return self._values[id(tensor)]

    def _encode(self, argument: Any) -> Any:
        def one(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return self._known(item)
            if isinstance(item, torch.dtype):
                return str(item)
            if isinstance(item, torch.device):
                return "device"
            if isinstance(item, torch.memory_format):
                return str(item)
            if isinstance(item, torch.layout):
                return None
            return item

        encoded = tree_map(one, argument)
        return _tuples(encoded)

    def _encode_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {key: self._encode(item) for key, item in kwargs.items() if key not in DROPPED}

    @contextmanager
    def at(self, node: Node, base: str) -> Iterator[None]:
        """What is recorded inside is for this node of the graph, and names are made from `base`."""
        before = self.origin, self.source, self.base
        self.origin, self.source, self.base = node.origin, node, base
        try:
            yield
        finally:
            self.origin, self.source, self.base = before


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call writes to."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
    return [
        given[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


@cache
def _functional(func: Any) -> str:
    """The operator that computes what an in-place one writes: the one of its arguments' types (`pow_.Scalar` is
    `pow.Tensor_Scalar`)."""
    namespace, name, _ = str(func).split(".")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    wanted = [str(argument.type) for argument in func._schema.arguments]
    for overload in packet.overloads() if packet is not None and name.endswith("_") else ():
        candidate = getattr(packet, overload)
        if [str(argument.type) for argument in candidate._schema.arguments] == wanted:
            return str(candidate)
    raise AssertionError(f"{func} mutates its operand and has no functional form")


def _tuples(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return tuple(_tuples(item) for item in argument)
    return argument
