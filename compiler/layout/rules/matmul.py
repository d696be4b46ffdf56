"""Products of matrices: a contracted factor may be cut, and makes the result a partial sum."""

from __future__ import annotations

import re

from compiler.ir.graph import Node
from compiler.layout.rule import Rule, einsum, rule, whole
from compiler.layout.rules.signature import arguments, by_name

PRODUCTS = {
    "aten.bmm.default": "b m k, b k n -> b m n",
    "aten.dot.default": "k, k ->",
    "aten.mm.default": "m k, k n -> m n",
    "aten.mv.default": "m k, k -> m",
    "aten.outer.default": "m, n -> m n",
    "aten.ger.default": "m, n -> m n",
}
BOTH = (frozenset({0}), frozenset({1}))
"""A product is linear in either operand."""


@rule(*PRODUCTS)
def product(node: Node) -> Rule:
    return einsum(node, PRODUCTS[node.op], linear=BOTH)


@rule("aten.matmul.default")
def matmul(node: Node) -> Rule:
    """Vectors contract their only dimension; what stands before the last two dimensions broadcasts."""
    left, right = (len(value.shape) for value in node.inputs)
    text = f"{'k' if left == 1 else '... m k'}, {'k' if right == 1 else '... k n'}"
    result = f"{'... ' if max(left, right) > 2 else ''}{'m ' if left > 1 else ''}{'n' if right > 1 else ''}"
    return einsum(node, f"{text} -> {result}", linear=BOTH)


@rule("aten.inner.default")
def inner(node: Node) -> Rule:
    """Both contract their last dimension; scalars multiply."""
    left, right = ([f"{side}{k}" for k in range(len(value.shape) - 1)] for side, value in zip("lr", node.inputs))
    if not all(value.shape for value in node.inputs):
        return whole(node)
    text = f"{' '.join(left)} k, {' '.join(right)} k -> {' '.join(left + right)}"
    return einsum(node, text, linear=BOTH)


@rule("aten.linear.default")
def linear(node: Node) -> Rule:
    operands = {"input": "... k", "weight": "n k" if len(node.inputs[1].shape) == 2 else "k", "bias": "n"}
    result = "... n" if len(node.inputs[1].shape) == 2 else "..."
    return by_name(node, operands, result, linear=("input bias", "weight bias"), addends=("bias",))


SUMS = {
    "aten.addmm.default": ("mat1", "m k", "mat2", "k n", "m n"),
    "aten.baddbmm.default": ("batch1", "b m k", "batch2", "b k n", "b m n"),
    "aten.addbmm.default": ("batch1", "b m k", "batch2", "b k n", "m n"),
    "aten.addmv.default": ("mat", "m k", "vec", "k", "m"),
    "aten.addr.default": ("vec1", "m", "vec2", "n", "m n"),
}


@rule(*SUMS)
def sum_of_products(node: Node) -> Rule:
    """`self + left @ right`, where `self` broadcasts to the result."""
    left, left_dims, right, right_dims, result = SUMS[node.op]
    rank = len(arguments(node)["self"].shape)
    added = " ".join(result.split()[len(result.split()) - rank :])
    operands = {"self": added, left: left_dims, right: right_dims}
    return by_name(node, operands, result, linear=(f"self {left}", f"self {right}"), addends=("self",))


@rule("aten.einsum.default")
def einsum_call(node: Node) -> Rule:
    """The equation is the rule. A repeated subscript takes a diagonal, for which the dimension must be whole."""
    equation = re.sub(r"\s", "", node.args[0])
    left, arrow, right = equation.partition("->")
    letters = [name for name in left if name.isalpha()]
    if not arrow:
        right = ("..." if "..." in left else "") + "".join(sorted(n for n in set(letters) if letters.count(n) == 1))

    def spaced(term: str) -> str:
        return " ".join(re.findall(r"\.\.\.|\w", term))

    terms = left.split(",")
    diagonal = frozenset(name for term in terms for name in term if name.isalpha() and term.count(name) > 1)
    each = tuple(frozenset({k}) for k in range(len(terms)))
    text = ", ".join(map(spaced, terms)) + " -> " + spaced(right)
    # A dimension in the ellipsis of the operands alone is summed by no one: einsum wants it in the result.
    return einsum(node, text, linear=each, fixed=diagonal)
