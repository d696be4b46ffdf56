"""The right-hand side of `recompute`: `none`, `full`, `selective` or `fit(70GB)`."""

from __future__ import annotations

from compiler.dsl import syntax
from compiler.dsl.kinds import Choice, Size
from compiler.dsl.names import Environment, Problem

POLICY = Choice("none", "full", "selective", noun="`none`, `full`, `selective` or `fit(70GB)`")


def convert_policy(node: syntax.Value, names: Environment) -> tuple[str, int | None]:
    """The policy, and for `fit` its limit in bytes."""
    if isinstance(node, syntax.Call) and node.function.name == "fit":
        if len(node.arguments) != 1:
            raise Problem(
                "E040", "`fit` takes one size", node.span, help=("write for example `fit(70GB)`",)
            )
        return "fit", Size().convert(node.arguments[0], names)
    if isinstance(node, syntax.Name) and node.name == "fit":
        raise Problem(
            "E040", "`fit` needs a size", node.span, help=("write for example `fit(70GB)`",)
        )
    if isinstance(node, syntax.Call):
        raise Problem(
            "E044",
            f"`{node.function.name}(…)` is not one of the choices here",
            node.function.span,
            help=(f"expected {POLICY.describe()}",),
        )
    return POLICY.convert(node, names), None
