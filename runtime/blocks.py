"""Which blocks of an attention matrix there is something to compute in.

Queries and keys of a part of the sequence are runs of consecutive positions. The plane of a query run and a key run is
cut into blocks, each of one kind:

    full     every query sees every key
    causal   the diagonal: as many queries as keys, from the same position on
    some     what is seen must be asked element by element

and what no query sees is left out, not masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor

from runtime.cuts import Run

TILE = 1024
"""Rows and columns of a block that is asked element by element, at most."""


@dataclass(frozen=True, slots=True)
class Block:
    """`rows` queries from local row `q`, which is position `q_at`, and `columns` keys likewise."""

    q: int
    q_at: int
    rows: int
    k: int
    k_at: int
    columns: int
    kind: str

    @property
    def area(self) -> float:
        """Pairs of a query and a key that it sees (of "some": that it may see)."""
        return self.rows * (self.rows + 1) / 2 if self.kind == "causal" else self.rows * self.columns


@lru_cache(maxsize=1024)
def visible_blocks(
    queries: tuple[Run, ...], keys: tuple[Run, ...], causal: bool, window: int | None
) -> tuple[Block, ...]:
    """The blocks of all query runs with all key runs. `window`: a query at i sees keys from i - window + 1 on."""
    return tuple(
        block
        for query in queries
        for key in keys
        for block in _between(query, key, causal, window)
        if block.rows and block.columns
    )


def _between(query: Run, key: Run, causal: bool, window: int | None) -> Iterator[Block]:
    if not causal:
        kind = "full" if window is None else "some"
        yield from _tiled(_block(query, key, kind), TILE) if kind == "some" else [_block(query, key, kind)]
        return
    edges = {query.start, query.start + query.length, key.start, key.start + key.length}
    for q in _split(query, edges):
        for k in _split(key, edges):
            if k.start > q.start:
                continue
            kind = "causal" if k.start == q.start else "full"
            yield from [_block(q, k, kind)] if window is None else _in_window(q, k, kind, window)


def _in_window(query: Run, key: Run, kind: str, window: int) -> Iterator[Block]:
    """The same within a sliding window: rows in tiles no higher than the window, each with the keys that it reaches."""
    step = min(window, TILE)
    for q in _split(query, range(query.start, query.start + query.length, step)):
        end = q.start + q.length
        reached = q.start - window + 1  # by the first row; by all of them: from end - window on
        edges = {reached, end - window, q.start, end}
        for k in _split(key, edges):
            if k.start + k.length <= reached or k.start >= end:
                continue
            if kind == "causal" and k.start == q.start:
                yield _block(q, k, "causal")
            else:
                yield _block(q, k, "full" if k.start >= end - window else "some")


def _split(run: Run, edges: Sequence[int] | set[int] | range) -> Iterator[Run]:
    """The run in pieces, cut at these positions."""
    inside = sorted(edge for edge in edges if run.start < edge < run.start + run.length)
    for first, last in zip([run.start, *inside], [*inside, run.start + run.length]):
        yield Run(first, run.local + first - run.start, last - first)


def _block(query: Run, key: Run, kind: str) -> Block:
    return Block(query.local, query.start, query.length, key.local, key.start, key.length, kind)


def _tiled(block: Block, tile: int) -> Iterator[Block]:
    for row in range(0, block.rows, tile):
        rows = min(tile, block.rows - row)
        for column in range(0, block.columns, tile):
            columns = min(tile, block.columns - column)
            at = {"q": block.q + row, "q_at": block.q_at + row, "k": block.k + column, "k_at": block.k_at + column}
            yield replace(block, rows=rows, columns=columns, **at)


def asked(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The same blocks, each to be asked element by element: for masks and dropout."""
    return tuple(
        piece for block in blocks for piece in _tiled(replace(block, kind="some"), TILE) if _reached(piece, block)
    )


def _reached(piece: Block, block: Block) -> bool:
    """Whether a tile of a block on the diagonal has anything at or below it."""
    return block.kind != "causal" or piece.k_at < piece.q_at + piece.rows


class Documents:
    """Which positions share a document. `ids`: int64[rows of the batch, positions] of the whole sequence."""

    def __init__(self, ids: Tensor):
        self.ids = ids.cpu()
        self.known: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}

    def extent(self, start: int, length: int) -> tuple[tuple[int, int], ...]:
        """For each row of the batch, the smallest and the largest document of some positions."""
        if (start, length) not in self.known:
            part = self.ids[..., start : start + length].flatten(0, -2)
            self.known[start, length] = tuple(zip(part.amin(-1).tolist(), part.amax(-1).tolist()))
        return self.known[start, length]

    def meet(self, block: Block) -> bool:
        """Whether queries and keys of a block may share a document in any row of the batch."""
        pairs = zip(self.extent(block.q_at, block.rows), self.extent(block.k_at, block.columns))
        return any(q_low <= k_high and k_low <= q_high for (q_low, q_high), (k_low, k_high) in pairs)

    def alone(self, block: Block) -> bool:
        """Whether a block is all one document, in every row of the batch."""
        pairs = zip(self.extent(block.q_at, block.rows), self.extent(block.k_at, block.columns))
        return all(low == high and (low, high) == other for (low, high), other in pairs)

    def within(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """What is left of the blocks where queries see keys of their own document alone."""
        found = []
        for block in blocks:
            for piece in _tiled(block, TILE):
                if _reached(piece, block) and self.meet(piece):
                    found.append(replace(piece, kind=_kind(piece, block) if self.alone(piece) else "some"))
        return tuple(found)


def _kind(piece: Block, block: Block) -> str:
    """The kind of a tile of a block."""
    if block.kind != "causal" or piece.k_at + piece.columns <= piece.q_at:
        return "full" if block.kind == "causal" else block.kind
    return "causal" if piece.k_at == piece.q_at and piece.rows == piece.columns else "some"
