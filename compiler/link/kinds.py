"""Kinds: equal segments are differentiated once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from compiler.autodiff.partition import SegmentCode, partition
from compiler.autodiff.trace import trace
from compiler.autodiff.weight_split import SplitBackward, split_backward
from compiler.ir.graph import Graph
from compiler.layout.placement import Mesh
from compiler.link.sources import Sources
from compiler.overlap.segment import Overlap
from compiler.recompute import policy_for
from compiler.segments.canonical import canonical, key
from compiler.segments.split import Segment


@dataclass
class Kind:
    """A distinct segment: its graph with neutral names, its code as it was recorded and as it runs, and the calls that use
    it."""

    name: str
    graph: Graph
    recorded: SegmentCode
    policy: str
    overlap: Overlap
    calls: list[str] = field(default_factory=list)

    @cached_property
    def code(self) -> SegmentCode:
        """The code that runs: its communication is behind its computation."""
        return self.overlap.code(self.recorded)

    @cached_property
    def split(self) -> SplitBackward:
        """The backward in two parts."""
        return self.overlap.split(split_backward(self.recorded), self.recorded)


class Kinds:
    """The distinct segments so far, by name."""

    def __init__(self, sources: Sources):
        self.sources = sources
        self.by_name: dict[str, Kind] = {}
        self._by_key: dict[tuple[str, tuple[bool, ...], str], Kind] = {}

    def of(self, segment: Segment, flags: tuple[bool, ...], mesh: Mesh | None = None) -> Kind:
        """The kind of a segment whose results have gradients where `flags` say so; `mesh`: not the plan's."""
        graph = canonical(segment)
        policy = policy_for(self.sources.plan, segment.unit)
        identity = (key(graph), flags, policy)
        if identity not in self._by_key:
            code = partition(trace(graph, mesh or self.sources.mesh, flags), policy)
            graph.name = self._name(segment)
            kind = Kind(graph.name, graph, code, policy, self.sources.overlap)
            self._by_key[identity] = self.by_name[kind.name] = kind
        return self._by_key[identity]

    def _name(self, segment: Segment) -> str:
        """The unit's path without the element's number: "layers" for "layers.3"."""
        base = "_".join(part for part in segment.name.split(".") if not part.isdigit()) or "segment"
        base = "".join(c if c.isalnum() else "_" for c in base)
        name, k = base, 2
        while name in self.by_name:
            name, k = f"{base}_{k}", k + 1
        return name
