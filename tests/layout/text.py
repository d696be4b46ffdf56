"""Propagation from text to text."""

from __future__ import annotations

import textwrap

import torch

from compiler.ir.graph import Graph
from compiler.ir.text import parse_graph, print_graph
from compiler.ir.verify import verify_graph
from compiler.layout.placement import Layout, Mesh
from compiler.layout.propagate import propagate
from compiler.passes.lower_support import CONSTANT


def read(text: str) -> Graph:
    """The graph in `text`. What is computed of something differentiable is, too, as far as its type allows."""
    graph = parse_graph(textwrap.dedent(text))
    for node in graph.nodes:
        learns = any(value.differentiable for value in node.inputs) and node.op not in CONSTANT
        for out in node.outputs:
            if out is not None:
                out.differentiable = learns and getattr(torch, out.dtype).is_floating_point
    return graph


def propagated(text: str, **mesh: int) -> Graph:
    """The graph with layouts; those of the inputs stand in the text."""
    graph = read(text)
    layouts = {value: value.layout or Layout() for value in graph.inputs}
    found = propagate(graph, Mesh(tuple(mesh.items())), layouts).graph
    found.remove_dead()
    verify_graph(found)
    return found


def body(graph: Graph) -> str:
    """Its nodes as text."""
    lines = print_graph(graph).splitlines()
    return "\n".join(line.strip() for line in lines if line.startswith("  %"))


def collectives(graph: Graph) -> list[str]:
    """planc's operators in it, in order."""
    return [node.op.removeprefix("planc.") for node in graph.nodes if node.op.startswith("planc.")]
