"""Modules that run as they are."""

from __future__ import annotations

from dataclasses import replace

from compiler.ir.graph import Node, Value
from compiler.layout.rule import Dims, Rule, rule, whole


@rule("planc.opaque")
def opaque(node: Node) -> Rule:
    """Nothing is known of what is inside, so everything is whole; that is no lack of a rule.

    A call that was declared to treat samples independently says `samples=True`: then dimension 0 of every operand and
    result that has as many rows as the first operand is the batch, which may be cut.
    """
    rule = replace(whole(node), fallback=False)
    if not node.kwargs.get("samples"):
        return rule
    rows = node.inputs[0].shape[0]

    def dims(value: Value | None, found: Dims | None) -> Dims | None:
        if value is None or found is None or not value.shape or value.shape[0] != rows:
            return found
        return (("batch",), *found[1:])

    return replace(
        rule,
        operands=tuple(dims(value, found) for value, found in zip(node.inputs, rule.operands)),
        results=tuple(dims(value, found) for value, found in zip(node.outputs, rule.results)),
        sizes={**rule.sizes, "batch": rows},
    )
