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
    after:   %y : float32[8, 4] = planc.opaque('experts', [%x], [%experts.w], '…', samples=(0,))

    The numbers are those of the arguments that hold samples: they depend on the batch, and have as many rows as the first
    that does. (A table of positions may have as many by chance.)
    """

    patterns: Sequence[Pattern] = ()
    name: str = "mark_per_sample"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()

    def __call__(self, graph: Graph) -> Graph:
        batch = graph.dependents(value for value in graph.inputs if value.kind == "batch")
        for node in graph.nodes:
            if node.op == "planc.opaque" and any(pattern.matches(node.args[0]) for pattern in self.patterns):
                held = [k for k, value in enumerate(node.args[1]) if value in batch and value.shape]
                rows = {node.args[1][k].shape[0] for k in held[:1]}
                samples = tuple(k for k in held if node.args[1][k].shape[0] in rows)
                node.kwargs = {**node.kwargs, **({"samples": samples} if samples else {})}
        return graph
