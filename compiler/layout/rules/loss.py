"""Losses, one number for each element. Their sums and means are operators of their own after lowering."""

from __future__ import annotations

from compiler.ir.graph import Node
from compiler.layout.rule import Rule, rule, whole
from compiler.layout.rules.pointwise import shared
from compiler.layout.rules.signature import arguments, by_name

ELEMENTWISE = tuple(
    f"aten.{name}.default"
    for name in """
    mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div poisson_nll_loss hinge_embedding_loss
    margin_ranking_loss binary_cross_entropy binary_cross_entropy_with_logits
    """.split()
)
"""Losses that without reduction are pointwise."""


@rule("planc.cross_entropy")
def cross_entropy(node: Node) -> Rule:
    """The target names a class for each element, or gives all classes' probabilities (then it is as large).

    With named classes the vocabulary may be cut: the operator exchanges maxima and sums of exponentials, never logits.
    """
    given = arguments(node)
    logits, target = given["logits"], given["target"]
    batch = "n" if len(logits.shape) > 1 else ""
    rest = "..." if batch else ""
    every, kept = f"{batch} c {rest}", f"{batch} {rest}"
    classes = kept if len(target.shape) < len(logits.shape) else every
    named = len(target.shape) < len(logits.shape)
    free = {"collective" if named else "fixed": frozenset({"c"})}
    return by_name(node, {"logits": every, "target": classes, "weight": "c"}, kept, **free)


@rule(*ELEMENTWISE)
def elementwise(node: Node) -> Rule:
    return whole(node) if arguments(node)["reduction"] else shared(node)
