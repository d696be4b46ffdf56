"""Losses, one number for each element. Their sums and means are operators of their own after lowering."""

from __future__ import annotations

from compiler.ir.graph import Node
from compiler.layout.rule import Rule, rule
from compiler.layout.rules.signature import arguments, by_name


@rule("planc.cross_entropy")
def cross_entropy(node: Node) -> Rule:
    """The target names a class for each element, or gives all classes' probabilities (then it is as large)."""
    given = arguments(node)
    logits, target = given["logits"], given["target"]
    batch = "n" if len(logits.shape) > 1 else ""
    rest = "..." if batch else ""
    every, kept = f"{batch} c {rest}", f"{batch} {rest}"
    classes = kept if len(target.shape) < len(logits.shape) else every
    return by_name(node, {"logits": every, "target": classes, "weight": "c"}, kept, fixed=frozenset({"c"}))
