"""The rules of a well-formed graph, checked between passes."""

from __future__ import annotations

from compiler.ir.graph import Graph, Value
from compiler.ir.text import format_node
from compiler.layout.placement import Shard


class IllFormed(AssertionError):
    """A pass broke the graph (a mistake in planc, never in a plan)."""


def verify_graph(graph: Graph, after: str = "") -> None:
    """Single assignment, operands before use, unique names, layouts that fit the shapes. Raises IllFormed."""
    where = f" after {after}" if after else ""
    defined: set[Value] = set()
    names: set[str] = set()

    def define(value: Value) -> None:
        if value in defined or value.name in names:
            raise IllFormed(f"%{value.name} is defined twice{where}")
        defined.add(value)
        names.add(value.name)
        check_layout(value, where)

    for value in graph.inputs:
        if value.producer is not None:
            raise IllFormed(f"the input %{value.name} has a producer{where}")
        define(value)
    for node in graph.nodes:
        for operand in node.inputs:
            if operand not in defined:
                raise IllFormed(f"%{operand.name} is used before it is made{where}: {format_node(node)}")
        for out in node.outputs:
            if out is not None:
                if out.producer is not node:
                    raise IllFormed(f"%{out.name} does not know its producer{where}")
                define(out)
    for role, value in graph.outputs.items():
        if value not in defined:
            raise IllFormed(f"the output {role} is not made in the graph{where}")


def check_layout(value: Value, where: str) -> None:
    if value.layout is None:
        return
    for axis, place in value.layout.items():
        if isinstance(place, Shard):
            fits = place.dim < len(value.shape) and value.shape[place.dim] % (place.outer * place.unit) == 0
            if not fits:
                raise IllFormed(f"%{value.name} with shape {value.shape} cannot be {place} over {axis}{where}")
