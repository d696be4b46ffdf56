"""mark_per_sample: opaque modules that the plan declares to treat samples independently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.dsl.plan import Pattern
from compiler.ir.graph import Graph


@dataclass(frozen=True)
class MarkPerSample:
    """Nothing is known of what is inside an opaque module, so it runs on whole values, unless the plan says
    `per_sample`: then its batch may be cut.

    before:  %y : float32[8, 4] = planc.opaque('experts', [%x], [%experts.w], '…')
    after:   %y : float32[8, 4] = planc.opaque('experts', [%x], [%experts.w], '…', samples=True)
    """

    patterns: Sequence[Pattern] = ()
    name: str = "mark_per_sample"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()

    def __call__(self, graph: Graph) -> Graph:
        for node in graph.nodes:
            if node.op == "planc.opaque" and any(pattern.matches(node.args[0]) for pattern in self.patterns):
                node.kwargs = {**node.kwargs, "samples": True}
        return graph
