"""planc's graph: values, nodes and graphs.

One small representation serves all levels between capture and emission. A `Value` has the dtype and the *global*
shape of the tensor that the model's author sees, plus, from the layout stage on, a `Layout` that says which part of
it each rank holds. A `Node` applies one operator to values and constants. A `Graph` is a list of nodes in execution
order with inputs and outputs; it is in single-assignment form and has no side effects (capture removes mutation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from compiler.layout.placement import Layout


@dataclass(frozen=True, slots=True)
class Origin:
    """Where in the user's model a node comes from.

    `module` is the dotted module path ("layers.3.attn.wq"), `source` the innermost line of the model's own code
    ("model.py:40"), `code` that line's text.
    """

    module: str = ""
    source: str = ""
    code: str = ""


@dataclass(slots=True, eq=False)
class Value:
    """One tensor. `shape` is global; `layout` is None before the layout stage.

    `kind` is "" for a computed value, else what a graph input is: "param", "buffer", "batch" (a model input),
    "constant" (a tensor held by the model that is neither), "hoisted" (made once a step by the prologue) or "slot"
    (made by another segment). `name` of an input is its logical name ("layers.0.attn.wq.weight").
    `differentiable`: a gradient with respect to it is wanted.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str = ""
    differentiable: bool = False
    layout: Layout | None = None
    producer: Node | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a tensor of this shape."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(slots=True, eq=False)
class Node:
    """`outputs = op(*args, **kwargs)`. Arguments are constants, values, or (nested) tuples of them.

    `op` is an operator's full name: "aten.linear.default", or "planc.all_reduce" for one of planc's own. An output
    that the operator declares but that nobody can use is None. `source`, of a node of local code: the node of the graph
    with layouts that it computes, or computes a gradient of.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Value | None]
    origin: Origin = Origin()
    source: Node | None = None

    @property
    def inputs(self) -> list[Value]:
        """The value operands, in argument order, repeated if used twice."""
        found: list[Value] = []
        for argument in (*self.args, *self.kwargs.values()):
            if isinstance(argument, Value):
                found.append(argument)
            elif isinstance(argument, (tuple, list, dict)):
                found += values_in(argument)
        return found

    def __repr__(self) -> str:
        return f"<{self.op} -> {self.outputs}>"


@dataclass(eq=False)
class Graph:
    """Inputs, nodes in execution order, and named outputs.

    `outputs` maps a role to a value: "loss", "metric:NAME", "buffer:NAME" (the new content of a mutated buffer), or
    the value's own name in a segment.
    """

    name: str
    inputs: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: dict[str, Value] = field(default_factory=dict)

    def users(self) -> dict[Value, list[Node]]:
        """Each value's consumers, in order."""
        users: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                users.setdefault(value, []).append(node)
        return users

    def values(self) -> Iterator[Value]:
        yield from self.inputs
        for node in self.nodes:
            yield from (out for out in node.outputs if out is not None)

    def dependents(self, values: Iterable[Value]) -> set[Value]:
        """These values, and all that depend on one of them."""
        found = set(values)
        for node in self.nodes:
            if not found.isdisjoint(node.inputs):
                found.update(out for out in node.outputs if out is not None)
        return found

    def remove_dead(self) -> None:
        """Drop nodes that reach no output (operators here have no side effects)."""
        self.nodes = live(self.nodes, self.outputs.values())


def live(nodes: Iterable[Node], wanted: Iterable[Value]) -> list[Node]:
    """The nodes that `wanted` depends on, in their order."""
    alive = set(wanted)
    kept = []
    for node in reversed(list(nodes)):
        if any(out in alive for out in node.outputs):
            alive.update(node.inputs)
            kept.append(node)
    return kept[::-1]


def values_in(argument: Any) -> Iterator[Value]:
    """Every `Value` inside nested tuples, lists and dicts, in order."""
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from values_in(item)
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from values_in(item)


def map_values(argument: Any, function: Callable[[Value], Any]) -> Any:
    """The same nested structure with each `Value` replaced by `function(value)`."""
    if isinstance(argument, Value):
        return function(argument)
    if isinstance(argument, (tuple, list)):
        return tuple(map_values(item, function) for item in argument)
    if isinstance(argument, dict):
        return {key: map_values(item, function) for key, item in argument.items()}
    return argument
