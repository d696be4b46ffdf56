"""Matrix products whose operand is gathered or whose result is reduced, in pieces: while one piece is communicated, the
next is multiplied (Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models", https://doi.org/10.1145/3567955.3567959).

Pieces are entries of what stands before the cut dimension (B below), or where that is a single one, ranges of the parts'
length L: so each is sent from and received into memory of its own, and products are written where they belong. Uneven
parts are padded as everywhere, and the padding is multiplied too.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from runtime.cuts import Cut, join_parts, split_parts
from runtime.transport import Transport
from runtime.transport.base import Group


def gather_matmul(
    transport: Transport, group: Group, x: Tensor, cut: Cut, terms: Sequence[tuple[Tensor, ...]], keep: bool,
    pieces: int, label: str,
) -> tuple[Tensor | None, list[Tensor]]:  # fmt: skip
    """x [B, L, k], a part under `cut` → the whole [B, count, k] (None unless `keep`), and for each (factor [k, n], bias [n]
    if any) the product [B*count, n].

    All pieces are under way from the beginning; each is multiplied when it has come.
    """
    (lead, length, width), ways = x.shape, len(group)
    whole = x.new_empty(lead, ways, length, width) if keep else None
    products = [x.new_empty(lead, ways, length, factor.shape[1]) for factor, *_ in terms]
    under_way = deque()
    for k, span in enumerate(spans(x.shape[_cut_dim(lead)], pieces)):
        mine = _piece(x.unsqueeze(1), span).contiguous()
        parts = mine.new_empty(ways, mine.shape[0], *mine.shape[2:])
        work = transport.all_gather(parts, mine, group, wait=False, label=f"{label}, piece {k + 1}")
        under_way.append((span, parts, mine, work))
    while under_way:
        span, parts, _, work = under_way.popleft()  # so that a piece is freed when it is multiplied
        work.wait()
        piece = _swapped(parts).contiguous() if whole is None else _piece(whole, span).copy_(_swapped(parts))
        for (factor, *bias), product in zip(terms, products):
            multiply(piece, factor, bias, _piece(product, span))
    rows = [None if t is None else join_parts(_swapped(t), cut) for t in (whole, *products)]
    return rows[0], [t.flatten(0, 1) for t in rows[1:] if t is not None]


def matmul_scatter(
    transport: Transport, group: Group, x: Tensor, cut: Cut, factor: Tensor, addends: Sequence[Tensor], zeros: bool,
    pieces: int, label: str,
) -> Tensor:  # fmt: skip
    """x [B, count, k] times the factor [k, n], plus addends ([n] or [B, count, n]), summed over the group: this rank's
    part [B, L, n] under `cut`.

    Padding repeats the last row, or is zero (`zeros`; then no addend is a row). Each piece is under way as soon as it is
    multiplied.
    """
    lead, ways, (_, width) = x.shape[0], len(group), factor.shape
    x, *addends = (_parted(item, cut, ways, zeros) if item.dim() == 3 else item for item in (x, *addends))
    out = x.new_empty(lead, x.shape[2], width)
    under_way = []
    for k, span in enumerate(spans(out.shape[_cut_dim(lead)], pieces)):
        piece = _piece(x, span)
        product = x.new_empty(*piece.shape[:-1], width)
        multiply(piece, factor, [item if item.dim() == 1 else _piece(item, span) for item in addends], product)
        terms, mine = _swapped(product).contiguous(), _piece(out.unsqueeze(1), span)
        work = transport.reduce_scatter(mine, terms, group, wait=False, label=f"{label}, piece {k + 1}")
        under_way.append((terms, work))
    for _, work in under_way:
        work.wait()
    return out


def matmul_reduce(
    transport: Transport, group: Group, x: Tensor, factor: Tensor, addends: Sequence[Tensor], keep: bool, pieces: int,
    label: str,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """x [rows, k] times the factor [k, n], plus addends ([n] or [rows, n]): this rank's (None unless `keep`), and summed
    over the group: [rows, n]."""
    out = x.new_empty(x.shape[0], factor.shape[1])
    here = torch.empty_like(out) if keep else None
    works = []
    for k, span in enumerate(spans(x.shape[0], pieces)):
        target = out[span] if here is None else here[span]
        multiply(x[span], factor, [item if item.dim() == 1 else item[span] for item in addends], target)
        if here is not None:
            out[span].copy_(target)
        works.append(transport.all_reduce(out[span], group, wait=False, label=f"{label}, piece {k + 1}"))
    for work in works:
        work.wait()
    return here, out


def spans(size: int, count: int) -> Iterator[slice]:
    """`size` in ranges of nearly equal lengths, at most `count`."""
    count = min(count, size)
    edges = [size * k // count for k in range(count + 1)]
    yield from (slice(start, end) for start, end in itertools.pairwise(edges))


def multiply(x: Tensor, factor: Tensor, addends: Sequence[Tensor], out: Tensor) -> None:
    """out = x @ factor + addends, of rows in any number of dimensions. `out` may be strided in all but the last two."""
    if x.is_contiguous() and out.is_contiguous():
        x, out = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if x.dim() == 2:
        torch.mm(x, factor, out=out)
    else:
        x, out = x.flatten(0, -3), out.flatten(0, -3)
        torch.bmm(x, factor.expand(x.shape[0], -1, -1), out=out)
    for addend in addends:
        out += addend if addend.dim() == 1 else addend.reshape(out.shape)


# Whole tensors are seen as [B, ways, L, width] here, parts as [B, 1, L, width].


def _cut_dim(lead: int) -> int:
    """Which of (B, L) is cut into pieces."""
    return 0 if lead > 1 else 1


def _piece(x: Tensor, span: slice) -> Tensor:
    """The piece at `span` of [B, ways, L, width]."""
    return x[span] if x.shape[0] > 1 else x[:, :, span]


def _swapped(x: Tensor) -> Tensor:
    """[B, ways, L, width] as collectives have it, [ways, B, L, width], or back."""
    return x.transpose(0, 1)


def _parted(x: Tensor, cut: Cut, ways: int, zeros: bool) -> Tensor:
    """[B, count, width] → [B, ways, L, width], with padding."""
    if cut.count % ways == 0 and not cut.order:
        return x.unflatten(1, (ways, -1))
    return _swapped(split_parts(x, cut, ways, zeros)).contiguous()
