"""Attention over a sequence that is cut over ranks.

Each rank has some of the queries. If it has all keys, there is nothing to communicate. If it has as many keys as
queries, the keys and values go round in a ring (Liu et al. 2023, https://arxiv.org/abs/2310.01889): at each step a rank
computes with the block that it has, while that block is already on its way to the next rank. A block goes no further
than to the last rank that sees any of it: in a ring of causal, windowed or document-wise attention many steps are never
made. Backward, the gradients of a block travel with it, and from the last rank straight home.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.blocks import Block
from runtime.blockwise import Backward, Forward, Scores, wide
from runtime.transport import Transport, Work


@dataclass(frozen=True)
class Ring:
    """The ranks that share the keys, each with one block of them; `index`: this rank's number in `group`.

    `blocks[b]`: what this rank's queries see of block b's keys. `hops[b]`: how many ranks behind its owner block b
    visits, the same on all ranks.
    """

    transport: Transport
    group: tuple[int, ...]
    index: int
    blocks: Sequence[Sequence[Block]]
    hops: Sequence[int]
    label: str

    @property
    def ways(self) -> int:
        return len(self.blocks)

    def owner(self, step: int) -> int:
        """Whose block comes here at a step."""
        return (self.index - step) % self.ways

    def visits(self, step: int) -> bool:
        """Whether that block comes at all."""
        return step < self.ways and self.hops[self.owner(step)] >= step

    def leaves(self, step: int) -> bool:
        """Whether it goes on to the next rank."""
        return self.hops[self.owner(step)] > step

    def send(self, tensor: Tensor, ahead: int, what: str) -> Work:
        """To the rank so many ahead."""
        peer = self.group[(self.index + ahead) % self.ways]
        return self.transport.send(tensor, peer, wait=False, label=f"{self.label}: send {what}")

    def receive(self, tensor: Tensor, ahead: int, what: str) -> Work:
        peer = self.group[(self.index + ahead) % self.ways]
        return self.transport.recv(tensor, peer, wait=False, label=f"{self.label}: receive {what}")

    def rounds(self, own: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        """(step, the keys that are here, if any). While one is worked on, the next is on its way."""
        here: Tensor | None = own
        for step in range(1 + max(self.hops)):
            works: list[Work] = []
            arriving: Tensor | None = None
            if self.visits(step + 1):
                arriving = torch.empty_like(own)
                works.append(self.receive(arriving, -1, f"keys of step {step + 1}"))
            if here is not None and self.leaves(step):
                works.append(self.send(here, 1, f"keys of step {step}"))
            yield step, here
            for work in works:
                work.wait()
            here = arriving


def forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries."""
    found = Forward(q, v.shape[-1], scores)
    if ring.ways == 1:
        found.add(k, v, ring.blocks[0])
    else:
        for step, here in ring.rounds(_packed(k, v)):
            if here is not None:
                found.add(*_unpacked(here, k, v), ring.blocks[ring.owner(step)])
    return found.out.to(q.dtype), found.lse


def backward(
    ring: Ring, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores,
    dmask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v; that of the mask is added to `dmask`."""
    found = Backward(grad, q, out, lse, scores, dmask)
    own = torch.zeros(k.numel() + v.numel(), dtype=wide(k.dtype), device=k.device)
    if ring.ways == 1:
        found.add(k, v, *_unpacked(own, k, v), ring.blocks[0])
    else:
        _rotate(ring, found, k, v, own)
    dk, dv = _unpacked(own, k, v)
    return found.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _rotate(ring: Ring, found: Backward, k: Tensor, v: Tensor, own: Tensor) -> None:
    """The keys go round as they did forward, and the sums of their gradients behind them; what other ranks add to those
    of this rank's keys comes back from the last rank that they visit."""
    sent: list[Work] = []
    sums: tuple[Tensor, Work] | None = None
    for step, here in ring.rounds(_packed(k, v)):
        if step == 0:
            gradients = own
        elif sums is not None:
            gradients = sums[0]
            sums[1].wait()
        else:
            gradients = torch.zeros_like(own)
        sums = None
        if step > 0 and ring.visits(step + 1):
            buffer = torch.empty_like(own)
            sums = buffer, ring.receive(buffer, -1, f"gradients of step {step + 1}")
        if here is None:
            continue
        found.add(*_unpacked(here, k, v), *_unpacked(gradients, k, v), ring.blocks[ring.owner(step)])
        if step > 0:
            ahead = 1 if ring.leaves(step) else -step
            sent.append(ring.send(gradients, ahead, f"gradients of step {step}"))
    if hops := ring.hops[ring.index]:
        rest = torch.empty_like(own)
        ring.receive(rest, hops, "gradients of its own keys").wait()
        own.add_(rest)
    for work in sent:
        work.wait()


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values as one message."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a message as keys and values."""
    return packed[: k.numel()].view(k.shape), packed[k.numel() :].view(v.shape)
