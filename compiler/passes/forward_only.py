"""forward_only: a program that scores or prefills has no gradients."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.graph import Graph


@dataclass(frozen=True)
class ForwardOnly:
    """Nothing is differentiable, so nothing is kept for a backward, and no layout asks for a sum of gradients.

    before:  input %w : float32[4, 4]  # kind=param differentiable
    after:   input %w : float32[4, 4]  # kind=param
    """

    name: str = "forward_only"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"forward_only"})

    def __call__(self, graph: Graph) -> Graph:
        for value in graph.values():
            value.differentiable = False
        return graph
