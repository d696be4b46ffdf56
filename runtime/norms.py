"""Norms of gradients: of the whole model and of its modules, each element counted once."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.context import RankContext
from runtime.optimizer import local_square_sum
from runtime.program import Program
from runtime.state import RankState
from runtime.store import Store


class GradientNorms:
    """Squared 2-norms of the reduced gradients by module, the same on every rank.

    `groups` are the modules: elements of lists, and what stands beside these (see `group_of`).
    """

    def __init__(self, program: Program, context: RankContext, state: RankState):
        self.context = context
        groups = dict.fromkeys(group_of(name) for name in program.norm_axes)
        self.groups = tuple(groups)
        place = {group: k for k, group in enumerate(groups)}
        # Over all parameters, wherever they lie: every rank takes part in the same sums.
        self.parts: dict[tuple[str, ...], list[tuple[int, Store, int, int]]] = {
            axes: [] for axes in sorted(set(program.norm_axes.values()))
        }
        for store in state.stores.values():
            # What several pipeline stages hold counts on the first.
            for name in (
                store.bucket.parameters if store.bucket.trained and state.stage == store.bucket.stages[0] else ()
            ):
                span = store.spans[name]
                start, end = store.inside(span.start, span.end)
                if end > start:
                    self.parts[program.norm_axes[name]].append((place[group_of(name)], store, start, end))

    def __call__(self) -> Tensor:
        """float64[groups]. Where ranks hold different parts of a gradient (cut by its layout, by ZeRO, on several
        stages), the squares are summed over those. Collective."""
        total = torch.zeros(len(self.groups), dtype=torch.float64, device=self.context.device)
        for axes, parts in self.parts.items():
            found: list[list[Tensor]] = [[] for _ in self.groups]
            for group, store, start, end in parts:
                assert store.reduced is not None
                found[group].append(store.reduced[start:end])
            squares = torch.stack([local_square_sum(gradients).to(total) for gradients in found])
            total += self.context.all_reduce(squares, axes, "sum") if axes else squares
        return total


def group_of(name: str) -> str:
    """The module that a parameter is counted with: `layers.3.attn.wq.weight` with `layers.3`, `model.norm.weight` with
    `model.norm`, `head.weight` with `head`."""
    parts = name.split(".")
    number = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:-1]) or name
