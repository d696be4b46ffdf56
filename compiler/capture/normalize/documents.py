"""Masks of packed documents: a query sees the keys of its own document.

before:  %q : int64[8, 64, 1] = aten.view.default(%documents, [8, 64, 1])
         %k : int64[8, 1, 64] = aten.view.default(%documents, [8, 1, 64])
         %same : bool[8, 64, 64] = aten.eq.Tensor(%q, %k)
         %mask : bool[8, 64, 64] = aten.bitwise_and.Tensor(%same, %causal)
after:   the documents are an operand of attention, and no mask of sequence x sequence is ever made
"""

from __future__ import annotations

from collections.abc import Iterator

from compiler.ir.graph import Value

AND = ("aten.bitwise_and.Tensor", "aten.logical_and.default", "aten.__and__.Tensor", "aten.mul.Tensor")
MOVES = ("aten.view.default", "aten.expand.default")


def conjuncts(mask: Value) -> Iterator[Value]:
    """The parts of a mask that all must hold, each over (…, queries, keys)."""
    node = mask.producer
    if node is not None and mask.dtype == "bool":
        if node.op in AND and all(isinstance(part, Value) and part.dtype == "bool" for part in node.args[:2]):
            parts = node.args[:2]
            if all(len(part.shape) >= 2 for part in parts):
                for part in parts:
                    yield from conjuncts(part)
                return
        if node.op in MOVES and _same_plane(node.args[0], mask):
            yield from conjuncts(node.args[0])
            return
    yield mask


def _same_plane(before: Value, after: Value) -> bool:
    """Whether a view or expansion leaves queries and keys where they are, and only adds or repeats in front."""
    if len(before.shape) < 2 or before.shape[-2:] != after.shape[-2:]:
        return False
    real = [size for size in before.shape[:-2] if size != 1]
    there = [size for size in after.shape[:-2] if size != 1]
    return not real or real == there


def same_document(mask: Value) -> Value | None:
    """The documents int64[batch, sequence] of which a mask compares those of queries and keys, if that is what it is."""
    node = mask.producer
    if node is None or node.op != "aten.eq.Tensor" or len(mask.shape) < 3:
        return None
    sources = [_spread(operand) for operand in node.args[:2]]
    if None in sources:
        return None
    (one, one_at), (other, other_at) = sources  # type: ignore[misc]
    length = mask.shape[-1]
    fits = one is other and len(one.shape) == 2 and one.shape[1] == length == mask.shape[-2]
    return one if fits and {one_at, other_at} == {-2, -1} else None


def _spread(value: Value) -> tuple[Value, int] | None:
    """(x, where): value is x[batch, sequence] with its sequence in dimension `where` from the end, -2 or -1."""
    node, shape = value.producer, value.shape
    if node is None or node.op != "aten.view.default" or len(node.args[0].shape) != 2 or len(shape) < 3:
        return None
    batch, length = node.args[0].shape
    plain = [size for size in shape[:-2] if size != 1] == ([batch] if batch != 1 else [])
    for where in (-2, -1):
        if plain and shape[where] == length and shape[-3 - where] == 1 and shape[0] == batch:
            return node.args[0], where
    return None
