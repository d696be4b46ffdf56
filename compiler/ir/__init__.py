"""The graph that every compiler stage reads and writes, its text form, and its verifier."""

from compiler.ir.graph import Graph, Node, Origin, Value, map_values, values_in

__all__ = ["Graph", "Node", "Origin", "Value", "map_values", "values_in"]
