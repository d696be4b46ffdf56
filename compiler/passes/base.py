"""What a pass is, and the runner that checks contracts and the graph between passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from compiler.ir.graph import Graph
from compiler.ir.verify import verify_graph


class Pass(Protocol):
    """A graph rewrite: a frozen dataclass whose fields are its options.

    `requires` names facts that earlier passes must have established, `provides` those that hold afterwards.
    """

    @property
    def name(self) -> str: ...
    @property
    def requires(self) -> frozenset[str]: ...
    @property
    def provides(self) -> frozenset[str]: ...

    def __call__(self, graph: Graph) -> Graph: ...


class ContractError(AssertionError):
    """A pass stands where what it requires does not hold yet (a mistake in planc, never in a plan)."""


def run_passes(
    graph: Graph, passes: Sequence[Pass], facts: Iterable[str] = (), watch: Callable[[str, Graph], None] | None = None
) -> Graph:
    """Apply the passes in order, verifying the graph after each. `watch(name, graph)` sees every intermediate graph."""
    known = set(facts)
    for item in passes:
        if missing := item.requires - known:
            raise ContractError(f"pass {item.name} requires {', '.join(sorted(missing))}; known: {sorted(known)}")
        graph = item(graph)
        verify_graph(graph, item.name)
        known |= item.provides
        if watch is not None:
            watch(item.name, graph)
    return graph
