"""Compare a call with what a pass makes of it."""

from __future__ import annotations

from typing import Any

from compiler.ir.graph import Graph
from compiler.ir.text import format_node
from compiler.ir.verify import verify_graph
from compiler.layout.placement import Layout, Mesh
from compiler.passes.base import Pass
from tests.layout.differential import Program, check
from tests.layout.test_rules import as_program
from tests.layout.text import read

__all__ = ["apply", "lowered", "ops", "read"]


def apply(item: Pass, program: Program) -> Program:
    """The program after the pass, its outputs expected to be what they were before."""
    expected = {role: program.tensors[value] for role, value in program.graph.outputs.items()}
    item(program.graph)
    verify_graph(program.graph, item.name)
    for role, value in program.graph.outputs.items():
        old = expected[role]
        assert value.shape == tuple(old.shape) and value.dtype == str(old.dtype).removeprefix("torch."), role
        program.tensors[value] = old
    return program


def lowered(item: Pass, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """Assert that the pass leaves results and gradients of a call as torch computes them."""
    program = apply(item, as_program(op, args, kwargs))
    check(program, Mesh((("one", 1),)), {value: Layout() for value in program.graph.inputs})
    return program


def ops(graph: Graph) -> list[str]:
    """Results and operators, without arguments."""
    return [format_node(node, origins=False).split("(")[0] for node in graph.nodes]
