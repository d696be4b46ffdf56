"""Attention of one rank's queries, whatever part of queries and keys a rank holds: from cuts to blocks and a ring.

Global shapes: query [..., h, s, d], key [..., h_kv, t, d]. `shape` is that of the weights, [..., h, s, t]; `q_cuts` are
all cuts of the query, `k_cuts` those of the keys' sequence. Where the keys are cut, the ranks exchange them
(`runtime.ring`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime import random, ring
from runtime.blocks import Block, Documents, asked, visible_blocks
from runtime.blockwise import Scores
from runtime.cuts import Cut, parse_cuts, positions, runs

if TYPE_CHECKING:
    from runtime.context import RankContext


@dataclass(frozen=True)
class Call:
    """What of a call depends on the plan alone. `p`, `site`: dropout of the weights and its call site."""

    causal: bool
    window: int | None
    scale: float
    p: float
    site: int | None
    shape: tuple[int, ...]
    q_cuts: str
    k_cuts: str

    @property
    def rows(self) -> tuple[Cut, ...]:
        return tuple(cut for cut in parse_cuts(self.q_cuts) if cut.dim == len(self.shape) - 2)

    @property
    def columns(self) -> tuple[Cut, ...]:
        return parse_cuts(self.k_cuts)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the keys are cut, outermost first."""
        return tuple(axis for cut in self.columns for axis in cut.axes)


@dataclass
class Planner:
    """Keeps what has been found out about calls: the layers of a model have the same. What depends on documents is kept
    for the last ones, without keeping these alive."""

    context: RankContext
    rings: dict[tuple, ring.Ring] = field(default_factory=dict)
    within: dict[tuple, ring.Ring] = field(default_factory=dict)
    documents: Callable[[], Tensor | None] = lambda: None

    def ring(self, call: Call, masked: bool, documents: Tensor | None) -> ring.Ring:
        if documents is not None and documents.device.type == "meta":
            documents, masked = None, True  # without data there may be a boundary anywhere
        if documents is not None and self.documents() is not documents:
            self.documents, self.within = weakref.ref(documents), {}
        rings = self.rings if documents is None else self.within
        key = (call.causal, call.window, call.shape[-2:], call.q_cuts, call.k_cuts, masked)
        if key not in rings:
            rings[key] = self.make(call, masked, None if documents is None else Documents(documents))
        return rings[key]

    def make(self, call: Call, masked: bool, documents: Documents | None) -> ring.Ring:
        context = self.context
        group = context.group(call.axes) if call.axes else (context.transport.rank,)
        index = group.index(context.transport.rank)
        members = [members_coords(call.axes, k, context.sizes, context.coords) for k in range(len(group))]
        queries = [tuple(runs(call.rows, call.shape[-2], context.sizes, at)) for at in members]
        keys = [tuple(runs(call.columns, call.shape[-1], context.sizes, at)) for at in members]

        def blocks(rank: int, block: int) -> Sequence[Block]:
            found = visible_blocks(queries[rank], keys[block], call.causal, call.window)
            return found if documents is None else [block for block in found if documents.meet(block)]

        def exactly(found: Sequence[Block]) -> Sequence[Block]:
            found = found if documents is None else documents.within(found)
            return asked(found) if masked else found

        ways = len(group)
        visited = [[step for step in range(ways) if blocks((b + step) % ways, b)] for b in range(ways)]
        own = [exactly(blocks(index, b)) for b in range(ways)]
        hops = [max(steps, default=0) for steps in visited]
        return ring.Ring(context.transport, group, index, own, hops, "attention")


def members_coords(
    axes: Sequence[str], index: int, sizes: Mapping[str, int], coords: Mapping[str, int]
) -> dict[str, int]:
    """The coordinates of member `index` of the group over `axes`, outermost first."""
    found = dict(coords)
    for axis in reversed(axes):
        index, found[axis] = divmod(index, sizes[axis])
    return found


def scores(context: RankContext, call: Call, mask: Tensor | None, documents: Tensor | None) -> Scores:
    keep = keeping(context, call) if call.p > 0 else None
    return Scores(call.causal, call.window, call.scale, mask, documents, call.p, keep)


def keeping(context: RankContext, call: Call) -> Callable[[slice, slice], Tensor]:
    """Which weights survive dropout: by their place in the whole, as everywhere (`runtime.random`)."""
    cuts = parse_cuts(call.q_cuts)
    where = [
        positions([c for c in cuts if c.dim == dim], size, context.sizes, context.coords, context.device)
        for dim, size in enumerate(call.shape[:-1])
    ]
    assert call.site is not None
    key = random.key(context.seed, context.step, context.site + call.site)

    def keep(rows: slice, columns: slice) -> Tensor:
        at = torch.arange(columns.start, columns.stop, device=context.device)
        index = random.global_index([*where[:-1], where[-1][rows], at], call.shape)
        return random.keep_mask(index, call.p, key)

    return keep


def forward(
    context: RankContext, planner: Planner, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    documents: Tensor | None, call: Call,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of the local queries. Rows that see nothing give zeros and an lse of -inf, padding too."""
    there = planner.ring(call, mask is not None or call.p > 0, documents)
    return ring.forward(there, q, k, v, scores(context, call, mask, documents))


def backward(
    context: RankContext, planner: Planner, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    documents: Tensor | None, out: Tensor, lse: Tensor, call: Call, learns_mask: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, v, and of a mask that learns."""
    there = planner.ring(call, mask is not None or call.p > 0, documents)
    dmask = torch.zeros_like(mask) if learns_mask and mask is not None else None
    found = ring.backward(there, grad, q, k, v, out, lse, scores(context, call, mask, documents), dmask)
    return found if dmask is None else (*found, dmask)
