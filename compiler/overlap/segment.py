"""Overlap in the code of a segment, forward and backward, and how much of its communication that hides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from compiler.analysis.cost import IN_PIECES
from compiler.analysis.machine import Machine, machine
from compiler.autodiff.partition import SegmentCode
from compiler.autodiff.weight_split import SplitBackward
from compiler.dsl.devices import known_devices
from compiler.dsl.plan import Plan
from compiler.dsl.strings import Link
from compiler.ir.graph import Node, Value
from compiler.layout.placement import Mesh
from compiler.overlap.behind import STARTS, behind
from compiler.overlap.pieces import ROWS, by_rows, in_pieces, over


@dataclass(frozen=True)
class Overlap:
    """How a plan's communication is hidden: on which machine, and over which axes in pieces where nothing else hides it.

    Code whose order must stay is left alone.
    """

    machine: Machine
    pieces: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh) -> Overlap:
        """Where the plan describes no cluster: fast devices, for which there is most to hide."""
        fast = Machine(known_devices()["h100"], mesh, plan.ranks, Link("NVLink", 450e9, 5e-6))
        tensor = plan.tensor
        axes = mesh.parts(*tensor.axes) if tensor is not None and tensor.overlap else ()
        return cls(machine(plan, mesh) if plan.cluster is not None else fast, axes)

    def code(self, code: SegmentCode) -> SegmentCode:
        """The same code, with its communication behind its computation."""
        if code.ordered:
            return code
        forward = self.nodes(code.forward, (), [*code.results, *code.saved])
        backward = self.nodes(code.backward, [*code.saved, *code.cotangents], code.gradients)
        return replace(code, forward=forward, backward=backward)

    def split(self, split: SplitBackward, code: SegmentCode) -> SplitBackward:
        """The same of the two parts of the code's backward."""
        if code.ordered:
            return split
        passed, kept = [*code.saved, *code.cotangents], [*split.input.gradients, *split.kept]
        first = replace(split.input, nodes=self.nodes(split.input.nodes, passed, kept))
        second = replace(split.weight, nodes=self.nodes(split.weight.nodes, split.kept, split.weight.gradients))
        return replace(split, input=first, weight=second)

    def nodes(self, nodes: Sequence[Node], passed: Sequence[Value], kept: Sequence[Value]) -> list[Node]:
        return in_pieces(behind(nodes, passed, kept, self.machine), kept, self.pieces)


def hidden(code: SegmentCode, axes: Iterable[str]) -> Counter[str]:
    """How many collectives over `axes` run "in pieces", "behind" other work, or are exposed: "alone", beside no product, or
    "apart", cut in another dimension than that of the rows."""
    found: Counter[str] = Counter()
    for node in (*code.forward, *code.backward):
        if not over(axes, node):
            continue
        if node.op in IN_PIECES:
            found["in pieces"] += 1
        elif node.op in STARTS.values():
            found["behind"] += 1
        else:
            found["alone" if node.op not in ROWS or by_rows(node) else "apart"] += 1
    return found
