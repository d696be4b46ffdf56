"""The bytes that local code holds while it runs, for any order of its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compiler.autodiff.partition import VIEWS
from compiler.ir.graph import Node, Value


class Footprint:
    """passed: what the code is given and releases after its last use; kept: what it returns.

    Views share the memory of what they view. The operand of a collective that is under way is held until its wait.
    """

    def __init__(self, nodes: Iterable[Node], passed: Iterable[Value], kept: Iterable[Value]):
        self.passed, self.base = list(passed), {}
        self.reads: dict[Node, list[Value]] = {}
        operand: dict[Value, list[Value]] = {}
        for node in nodes:
            reads = [self.memory(value) for value in node.inputs]
            if node.op in VIEWS or node.op == "planc.wait":
                self.base.update((out, reads[0]) for out in node.outputs if out is not None)
            elif node.op.startswith("planc.start_"):
                operand.update((out, reads) for out in node.outputs if out is not None)
            self.reads[node] = [held for value in reads for held in (value, *operand.get(value, ()))]
        self.kept = {self.memory(value) for value in kept}

    def memory(self, value: Value) -> Value:
        """The value whose memory this one is in."""
        return self.base.get(value, value)

    def peak(self, order: Sequence[Node]) -> int:
        """The most bytes at one time, besides arguments that the caller keeps anyway."""
        last = {value: k for k, node in enumerate(order) for value in self.reads[node]}
        live = {value: value.nbytes for value in self.passed}
        now = most = sum(live.values())
        for k, node in enumerate(order):
            made = {out: out.nbytes for out in node.outputs if out is not None and self.memory(out) is out}
            live.update(made)
            now += sum(made.values())
            most = max(most, now)
            for value in dict.fromkeys([*self.reads[node], *made]):
                if last.get(value, k) == k and value not in self.kept:
                    now -= live.pop(value, 0)
        return most
