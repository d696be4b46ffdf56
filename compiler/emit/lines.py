"""From a line of generated code back to the node that it was written for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from compiler.ir.graph import Node

if TYPE_CHECKING:
    from compiler.link import Kind

_NO_NODE = ("#", "del ", "return ", "given.clear()")


def node_lines(kind: Kind, source: str) -> Mapping[int, Node]:
    """Line number → node, of a kind's code. Each node has one line, in order, in each function that it is part of."""
    found: dict[int, Node] = {}
    nodes = iter(())
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith("def "):
            nodes = iter(functions(kind)[line.removeprefix("def ").partition("(")[0]])
        elif line.startswith("    ") and not line.strip().startswith(_NO_NODE) and not line.endswith(" = given"):
            if (node := next(nodes, None)) is not None:
                found[number] = node
    return found


def functions(kind: Kind) -> dict[str, list[Node]]:
    """The nodes of each function of a kind's code, by its name."""
    return {
        "forward": kind.code.forward,
        "backward": kind.code.backward,
        "backward_input": kind.split.input.nodes,
        "backward_weight": kind.split.weight.nodes,
    }
