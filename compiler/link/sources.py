"""Sources: what linking reads, and what follows from it at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from compiler.capture import Captured
from compiler.dsl.plan import Plan
from compiler.ir.graph import Value
from compiler.layout.placement import Mesh
from compiler.overlap.segment import Overlap
from compiler.passes.assign_layouts import Assigned, LayoutRequest
from compiler.pipeline.staging import pipeline_axis
from compiler.precision import Precision, Stored
from compiler.zero import Sharding, sharding


@dataclass(frozen=True)
class Sources:
    """A plan, its captured model, and the model's graphs with layouts."""

    plan: Plan
    captured: Captured
    assigned: Assigned
    request: LayoutRequest
    precision: Precision = Precision()

    @property
    def mesh(self) -> Mesh:
        return self.request.mesh

    @cached_property
    def overlap(self) -> Overlap:
        return Overlap.of(self.plan, self.mesh)

    @cached_property
    def zero(self) -> Sharding:
        return sharding(self.plan, self.mesh)

    @property
    def pipeline(self) -> str:
        """The mesh axis of the pipeline, "" where there is none."""
        return pipeline_axis(self.plan)

    @property
    def trains(self) -> bool:
        return self.plan.mode == "train"

    def parameters(self) -> Iterator[Value]:
        """The parameters that the graph reads."""
        return (value for value in self.assigned.main.inputs if value.kind == "param")

    def stored(self, name: str) -> Stored:
        """The dtypes of a trained parameter."""
        return self.precision.stored(self.captured.parameters[name].own)
