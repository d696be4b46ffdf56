"""The graph that normalization writes: handlers by operator, and the few operators that they write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch

from compiler.capture.importer import Names
from compiler.ir.graph import Graph, Node, Origin, Value, map_values

Handler = Callable[["Builder", "Call"], Any]
HANDLERS: dict[str, Handler] = {}
NEUTRAL = {"device", "pin_memory", "layout", "memory_format", "non_blocking"}
"""Arguments that say where a tensor is, not what it is: programs are device-neutral."""


def handler(*ops: str) -> Callable[[Handler], Handler]:
    """Register a function for operators ("view.default" of the namespace aten)."""

    def register(function: Handler) -> Handler:
        for op in ops:
            HANDLERS[f"aten.{op}"] = function
        return function

    return register


class Call:
    """One call to be normalized: its node, and its arguments (of the new graph) by name, defaults filled in."""

    def __init__(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.node, self.args, self.kwargs = node, args, kwargs
        given = dict(zip((name for name, _, _ in schema_of(node.op)), args)) | kwargs
        self.named = {name: given.get(name, default) for name, default, _ in schema_of(node.op)}

    def __getitem__(self, name: str) -> Any:
        return self.named[name]

    @property
    def out(self) -> Value:
        """The (old) value of the first result that is used."""
        return next(value for value in self.node.outputs if value is not None)

    @property
    def x(self) -> Value:
        """The first operand."""
        value = self.args[0]
        assert isinstance(value, Value)
        return value


@cache
def schema_of(op: str) -> tuple[tuple[str, Any, str], ...]:
    """(name, default, type) of each argument of an ATen operator."""
    namespace, packet, overload = op.split(".")
    schema = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._schema
    return tuple((a.name, a.default_value if a.has_default_value() else None, str(a.type)) for a in schema.arguments)


class Builder:
    """Writes a new graph. `env` maps values of the old one to values of the new one."""

    def __init__(self, old: Graph):
        self.graph = Graph(old.name, list(old.inputs))
        self.env: dict[Value, Value] = {value: value for value in old.inputs}
        self.names = Names({value.name for value in old.inputs})
        self.origin = Origin()
        self.sites = 0

    def normalized(self, node: Node) -> Sequence[Value | None]:
        """Write what stands for a node; its results in order."""
        self.origin = node.origin
        args, kwargs = map_values((node.args, node.kwargs), self.env.__getitem__)
        if node.op == "aten.detach.default" and not args[0].differentiable:
            return [args[0]]
        if node.op.startswith("planc."):
            return self.emit_many(node.op, args, kwargs, [_type(out) for out in node.outputs])
        call = Call(node, args, {key: item for key, item in kwargs.items() if key not in NEUTRAL})
        function = HANDLERS.get(node.op)
        results = function(self, call) if function is not None else self.keep(call)
        return results if isinstance(results, (list, tuple)) else [results]

    def keep(self, call: Call) -> Sequence[Value | None]:
        """The same call, with dimensions that count from the front and without arguments about devices."""
        args, kwargs = positive_dims(call)
        args = list(args)
        for k, (name, default, _) in enumerate(schema_of(call.node.op)[: len(args)]):
            if name in NEUTRAL:
                args[k] = default
        args, kwargs = self.promoted(call.node, tuple(args), kwargs)
        return self.emit_many(call.node.op, args, kwargs, [_type(out) for out in call.node.outputs])

    def promoted(
        self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of elementwise arithmetic on integers alone that makes floating numbers: in the dtype that it has here,
        which else would be torch's default at the time of the run."""
        out = node.outputs[0]
        real = out is not None and getattr(torch, out.dtype).is_floating_point
        if not real or not node.inputs or not _is_arithmetic(node.op):
            return args, kwargs
        if any(getattr(torch, value.dtype).is_floating_point for value in node.inputs):
            return args, kwargs
        wide: tuple[tuple[Any, ...], dict[str, Any]] = map_values((args, kwargs), lambda value: self.cast(value, out.dtype))
        return wide

    def emit_many(
        self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], types: Iterable[tuple[str, tuple[int, ...]] | None]
    ) -> list[Value | None]:
        node = Node(op, args, kwargs, [], self.origin)
        learns = op != "aten.detach.default" and any(value.differentiable for value in node.inputs)
        for found in types:
            if found is None:
                node.outputs.append(None)
                continue
            dtype, shape = found
            real = dtype.startswith(("float", "bfloat", "complex"))
            name = self.names(op.split(".")[1].strip("_"))
            node.outputs.append(Value(name, dtype, tuple(shape), "", learns and real, None, node))
        self.graph.nodes.append(node)
        return node.outputs

    def emit(self, op: str, args: tuple[Any, ...], dtype: str, shape: Sequence[int], /, **kwargs: Any) -> Value:
        (value,) = self.emit_many(op, args, kwargs, [(dtype, tuple(shape))])
        assert value is not None
        return value

    # -- the normal forms ------------------------------------------------------------------------------------------

    def view(self, x: Value, shape: Sequence[int]) -> Value:
        shape = tuple(shape)
        before = x
        while before.producer is not None and before.producer.op == "aten.view.default":
            before = before.producer.args[0]
            if before.shape == shape:
                return before  # there and back again
        return x if x.shape == shape else self.emit("aten.view.default", (x, shape), x.dtype, shape)

    def permute(self, x: Value, dims: Sequence[int]) -> Value:
        dims = tuple(dim % len(x.shape) for dim in dims)
        if dims == tuple(range(len(dims))):
            return x
        return self.emit("aten.permute.default", (x, dims), x.dtype, [x.shape[dim] for dim in dims])

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        shape = tuple(shape)
        return x if x.shape == shape else self.emit("aten.expand.default", (x, shape), x.dtype, shape)

    def cast(self, x: Value, dtype: str) -> Value:
        return x if x.dtype == dtype else self.emit("planc.cast", (x, f"torch.{dtype}"), dtype, x.shape)

    def slice(self, x: Value, dim: int, start: int | None, end: int | None, step: int = 1) -> Value:
        dim, size = dim % len(x.shape), x.shape[dim % len(x.shape)]
        start, end = _bound(0 if start is None else start, size), _bound(size if end is None else end, size)
        if (start, end, step) == (0, size, 1):
            return x
        length = max(0, -(-(end - start) // step))
        shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
        return self.emit("aten.slice.Tensor", (x, dim, start, max(start, end), step), x.dtype, shape)

    def select(self, x: Value, dim: int, index: int) -> Value:
        dim %= len(x.shape)
        shape = (*x.shape[:dim], *x.shape[dim + 1 :])
        return self.emit("aten.select.int", (x, dim, index % x.shape[dim]), x.dtype, shape)

    def full(self, shape: Sequence[int], value: float, dtype: str) -> Value:
        return self.emit("aten.full.default", (tuple(shape), value), dtype, shape, dtype=f"torch.{dtype}")

    def copied(self, x: Value) -> Value:
        return self.emit("aten.clone.default", (x,), x.dtype, x.shape)

    def site(self) -> int:
        """The number of the next random operator."""
        self.sites += 1
        return self.sites - 1


@cache
def _is_arithmetic(op: str) -> bool:
    """Whether an operator is elementwise, and its operands are numbers."""
    namespace, name, overload = op.split(".")
    if namespace != "aten" or name == "where":
        return False
    return torch.Tag.pointwise in getattr(getattr(torch.ops.aten, name), overload).tags


def _bound(at: int, size: int) -> int:
    return min(max(at + size if at < 0 else at, 0), size)


def _type(value: Value | None) -> tuple[str, tuple[int, ...]] | None:
    return None if value is None else (value.dtype, value.shape)


DIMS = {"dim", "dims", "axis", "axes", "dim0", "dim1", "dim2", "axis0", "axis1"}
ONE_MORE = {"aten.stack.default"}
"""Whose dimension counts in the result, which has one more than the operands."""


def positive_dims(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with dimensions counted from the front."""
    values = call.node.inputs
    if not values:
        return call.args, call.kwargs
    rank = max(1, len(values[0].shape) + (call.node.op in ONE_MORE))
    kinds = {name: kind for name, _, kind in schema_of(call.node.op)}

    def fixed(name: str, item: Any) -> Any:
        if name not in DIMS or "int" not in kinds[name]:
            return item
        if isinstance(item, int) and not isinstance(item, bool):
            return item % rank
        return tuple(dim % rank for dim in item) if isinstance(item, tuple) else item

    args = tuple(fixed(name, item) for (name, _, _), item in zip(schema_of(call.node.op), call.args))
    return args, {name: fixed(name, item) for name, item in call.kwargs.items()}
