"""Joined indices: one that is several others, one behind the other, as `split`, `slice` and `cat` have them.

Where a rule says `joined = {"c": ("c0", "c1", "c2")}`, no plain cut of the whole falls on parts of its parts. But a rank
can hold its part of *each*: then the whole is cut in pieces, and the parts are cut plainly (or in pieces, where the
whole has more pieces than the rule has parts).

    qkv : [b, s, (4 + 1 + 1) 8] {tp: S(2, 4+1+1)}    ↔    q : [b, s, 32] {tp: S(2)}    k, v : [b, s, 8] {tp: S(2)}

Pieces are lists of relative lengths here. Those of equal lengths are spelled as a factor outside of the cut, so
`[q | k | v]` of one length is `S(2, outer=3)`, which a rule follows as it does any other factor (`factors.refined`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from compiler.layout.placement import Shard
from runtime.cuts import piece_lengths

Pieces = tuple[int, ...]


def pieces_in(order: str) -> Pieces | None:
    """The pieces that an order of cuts names; None for zigzag, where a rank holds no part of each."""
    if order == "zigzag":
        return None
    return piece_lengths(order) if order else (1,)


def order_of(pieces: Sequence[int]) -> str:
    """The order of a cut in these pieces."""
    return "+".join(str(length // math.gcd(*pieces)) for length in pieces) if len(pieces) > 1 else ""


def in_pieces(shard: Shard, pieces: Sequence[int]) -> Shard:
    """`shard`, a plain cut, of each of the pieces of what it cuts; in its one spelling."""
    period = next(n for n in range(1, len(pieces) + 1) if len(pieces) % n == 0 and repeats(pieces, n))
    return replace(shard, outer=shard.outer * (len(pieces) // period), order=order_of(pieces[:period]))


def repeats(pieces: Sequence[int], n: int) -> bool:
    """Whether the pieces are their first n, again and again."""
    return all(length == pieces[k % n] for k, length in enumerate(pieces))


def pieces_of_part(pieces: Sequence[int], sizes: Sequence[int], k: int) -> Pieces | None:
    """The pieces of part k, of a whole in `pieces` that is also parts of these `sizes`. None where a part ends inside a
    piece.

    >>> pieces_of_part((4, 1, 1), (32, 16), 1)
    (1, 1)
    """
    total, size = sum(pieces), sum(sizes)
    edges = [edge * size for edge in itertools.accumulate(pieces, initial=0)]  # in the smallest common unit
    borders = [border * total for border in itertools.accumulate(sizes, initial=0)]
    if not set(borders) <= set(edges):
        return None
    first, last = edges.index(borders[k]), edges.index(borders[k + 1])
    return tuple(pieces[first:last])


def pieces_of_whole(parts: Sequence[Pieces], sizes: Sequence[int]) -> Pieces:
    """The pieces of a whole whose parts, of these sizes, are cut in `parts`; () if one is not cut in pieces.

    >>> pieces_of_whole([(1,), (1, 1)], [32, 16])
    (4, 1, 1)
    """
    if not all(parts):
        return ()
    unit = math.lcm(*(sum(pieces) for pieces in parts))
    found = [length * size * (unit // sum(pieces)) for pieces, size in zip(parts, sizes) for length in pieces]
    return tuple(length // math.gcd(*found) for length in found)
