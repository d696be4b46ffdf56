"""The context of a rank: what generated code calls besides ATen operators.

Every tensor that it gives is contiguous, as the code was recorded. It knows where the rank stands on the mesh, which micro-batch and step it is at, and does the communication of
redistributions inside segments. A cut is written as `runtime.cuts` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtime import attention as attention_kernels
from runtime import cross_entropy, decomposition, random, split_attention
from runtime.cuts import join_parts, parse_cuts, positions, put_part, split_parts, take_part
from runtime.log_sum_exp import log_sum_exp
from runtime.mesh import TIME, Mesh
from runtime.opaque import call_opaque
from runtime.pending import Pending
from runtime.transport import Transport


class RankContext:
    """`coords` has the rank's coordinate on each axis, and the current micro-batch under "micro"."""

    def __init__(
        self, mesh: Mesh, transport: Transport, microbatches: int, seed: int, batch: int, pipeline: str = ""
    ):  # fmt: skip
        self.mesh, self.transport, self.pipeline = mesh, transport, pipeline
        self.device = transport.device
        self.sizes = dict(mesh.axes) | {TIME: microbatches}
        self.coords = mesh.coords(transport.rank) | {TIME: 0}
        self.seed, self.step, self.site = seed, 0, 0
        self.batch = self.real_rows = batch
        self.where = ""
        self.opaque_modules: Mapping[str, Any] = {}
        self.targets: list[tuple[Tensor, bool] | None] = []
        self._groups: dict[tuple[tuple[str, ...], tuple[int, ...]], tuple[int, ...]] = {}
        self._tapes: dict[int, Any] = {}
        self._index_cache: dict[Any, list[Tensor]] = {}
        self._planner = split_attention.Planner(self)

    def group(self, axes: tuple[str, ...], stages: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The ranks over `axes`; of those over the pipeline's only the given stages."""
        if (axes, stages) not in self._groups:
            self._groups[axes, stages] = stage_group(self.mesh, self.transport.rank, axes, self.pipeline, stages)
        return self._groups[axes, stages]

    def peer(self, axis: str, index: int) -> int:
        """The rank at `index` on one axis, and here on all others."""
        return self.mesh.rank({**{name: self.coords[name] for name in self.mesh.names}, axis: index})

    # -- communication -------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], op: str) -> Tensor:
        """P → R over the axes."""
        return self.start_all_reduce(x, axes, op, wait=True).result()

    def start_all_reduce(self, x: Tensor, axes: tuple[str, ...], op: str, wait: bool = False) -> Pending:
        out = x.clone(memory_format=torch.contiguous_format)
        label = f"{self.where}: all_reduce over {axes}"
        work = self.transport.all_reduce(out, self.group(axes), op=op, wait=wait, label=label)
        return Pending(work, out, lambda: out)

    def all_gather(self, x: Tensor, cut: str) -> Tensor:
        """S → R: the parts in their order, padding removed."""
        return self.start_all_gather(x, cut, wait=True).result()

    def start_all_gather(self, x: Tensor, cut: str, wait: bool = False) -> Pending:
        (c,) = parse_cuts(cut)
        group, x = self.group(c.axes), x.contiguous()
        parts = x.new_empty((len(group), *x.shape))
        work = self.transport.all_gather(parts, x, group, wait=wait, label=f"{self.where}: all_gather over {c.axes}")
        return Pending(work, x, lambda: join_parts(parts, c))

    def reduce_scatter(self, x: Tensor, cut: str, zeros: bool = False) -> Tensor:
        """P → S, with padding as `shard` has it."""
        return self.start_reduce_scatter(x, cut, zeros, wait=True).result()

    def start_reduce_scatter(self, x: Tensor, cut: str, zeros: bool = False, wait: bool = False) -> Pending:
        (c,) = parse_cuts(cut)
        group = self.group(c.axes)
        parts = split_parts(x, c, len(group), zeros)
        out = torch.empty_like(parts[0])
        label = f"{self.where}: reduce_scatter over {c.axes}"
        work = self.transport.reduce_scatter(out, parts, group, wait=wait, label=label)
        return Pending(work, parts, lambda: out)

    def all_to_all(self, x: Tensor, source: str, target: str, zeros: bool = False) -> Tensor:
        """S(i) → S(j): from one cut over an axis to a cut of another dimension, with padding as `shard` has it."""
        return self.start_all_to_all(x, source, target, zeros, wait=True).result()

    def start_all_to_all(
        self, x: Tensor, source: str, target: str, zeros: bool = False, wait: bool = False
    ) -> Pending:
        (before,), (after,) = parse_cuts(source), parse_cuts(target)
        group = self.group(after.axes)
        parts = split_parts(x, after, len(group), zeros)
        out = torch.empty_like(parts)
        label = f"{self.where}: all_to_all over {after.axes}"
        work = self.transport.all_to_all(out, parts, group, wait=wait, label=label)
        return Pending(work, parts, lambda: join_parts(out, before))

    def gather_matmul(
        self, x: Tensor, cut: str, terms: tuple[tuple[Tensor, ...], ...], keep: bool, pieces: int
    ) -> tuple[Tensor | None, ...]:
        """`all_gather` of the rows of [..., rows, k], and for each (factor [k, n], bias [n] if any) the product of all
        rows: (whole, or None unless `keep`, [rows, n], …). In pieces, as the next two (see `runtime.decomposition`)."""
        (c,) = parse_cuts(cut)
        label = f"{self.where}: gather_matmul over {c.axes}"
        rows = x.reshape(-1, *x.shape[-2:])
        whole, products = decomposition.gather_matmul(
            self.transport, self.group(c.axes), rows, replace(c, dim=1), terms, keep, pieces, label
        )
        return None if whole is None else whole.view(*x.shape[:-2], *whole.shape[-2:]), *products

    def matmul_scatter(
        self, x: Tensor, factor: Tensor, addends: tuple[Tensor, ...], lead: tuple[int, ...], cut: str, zeros: bool,
        pieces: int,
    ) -> Tensor:  # fmt: skip
        """x [rows, k] times the factor [k, n] plus addends, seen as [*lead, rows, n], then `reduce_scatter` of its rows."""
        (c,) = parse_cuts(cut)
        label = f"{self.where}: matmul_scatter over {c.axes}"
        x, *addends = (t if t.dim() == 1 else t.reshape(-1, c.count, t.shape[-1]) for t in (x, *addends))
        out = decomposition.matmul_scatter(
            self.transport, self.group(c.axes), x, replace(c, dim=1), factor, addends, zeros, pieces, label
        )  # fmt: skip
        return out.view(*lead, *out.shape[-2:])

    def matmul_reduce(
        self, x: Tensor, factor: Tensor, addends: tuple[Tensor, ...], lead: tuple[int, ...], axes: tuple[str, ...],
        keep: bool, pieces: int,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        """x [rows, k] times the factor [k, n] plus addends, and the `all_reduce` of that, both [*lead, n]. The first is
        None unless it is to be kept."""
        label = f"{self.where}: matmul_reduce over {axes}"
        addends = [item if item.dim() == 1 else item.reshape(-1, item.shape[-1]) for item in addends]
        here, out = decomposition.matmul_reduce(
            self.transport, self.group(axes), x, factor, addends, keep, pieces, label
        )  # fmt: skip
        return None if here is None else here.view(*lead, -1), out.view(*lead, -1)

    @staticmethod
    def wait(pending: Pending) -> Tensor:
        """The result of what a `start_…` began."""
        return pending.result()

    # -- local parts ---------------------------------------------------------------------------------------------

    def shard(self, x: Tensor, cut: str, zeros: bool = False) -> Tensor:
        """R → S or V → S: this rank's part. Padding repeats the last entry, as finite as real ones, or holds `zeros`:
        a gradient has nothing there."""
        (c,) = parse_cuts(cut)
        if not c.axes:
            return x
        held = x.shape[c.dim] // (c.outer * c.unit)  # less than c.count where other axes cut the factor already
        return take_part(x, replace(c, count=held), self.sizes, self.coords, zeros)

    def unshard(self, x: Tensor, cut: str) -> Tensor:
        """The transpose of V → S: this rank's part in its place, zeros elsewhere."""
        (c,) = parse_cuts(cut)
        if not c.axes:
            return x
        held = min(c.count, x.shape[c.dim] // (c.outer * c.unit) * c.ways(self.sizes))
        return put_part(x, replace(c, count=held), self.sizes, self.coords)

    def first(self, x: Tensor, axis: str) -> Tensor:
        """V → P: the first rank (or micro-batch) keeps the value, the others add nothing."""
        return x if self.coords[axis] == 0 else torch.zeros_like(x)

    def mask(self, x: Tensor, cut: str, limit: int | tuple[str, int], reduction: str) -> Tensor:
        """The reduction's neutral element where the cut dimension is padding (or a row that is not real).

        `limit` is the number of real units, or ("rows", k): k for each real row of the batch.
        """
        (c,) = parse_cuts(cut)
        last = limit if isinstance(limit, int) else limit[1] * self.real_rows
        spans = c.spans(self.sizes, self.coords)
        if all(start + length <= last for start, length in spans):
            return x
        fill = {"sum": 0, "max": _extreme(x.dtype, -1), "min": _extreme(x.dtype, 1)}[reduction]
        out, at = x.unflatten(c.dim, (c.outer, sum(length for _, length in spans), c.unit)).clone(), 0
        for start, length in spans:
            real = min(max(last - start, 0), length)
            out.narrow(c.dim + 1, at + real, length - real).fill_(fill)
            at += length
        return out.flatten(c.dim, c.dim + 2)

    def own_rows(self, index: Tensor, cut: str) -> tuple[Tensor, Tensor]:
        """(position in this rank's part of a cut table, 0 for what others have; whether others have it [..., 1])."""
        (c,) = parse_cuts(cut)
        start, length = c.part(self.sizes, self.coords)
        self._inside(index, c.count)
        local = index - start
        others = (local < 0) | (local >= length)
        return local.masked_fill(others, 0), others.unsqueeze(-1)

    @staticmethod
    def _inside(index: Tensor, rows: int) -> None:
        """Refuse an index outside of the whole table, as one device does: else no rank has it, and all give zeros."""
        outside = ((index < 0) | (index >= rows)).any()
        if index.is_cuda:
            torch._assert_async(~outside, f"an index is outside of a table of {rows} rows")
        elif not index.is_meta and outside:
            raise IndexError(f"index out of range: the table has {rows} rows, the indices reach {int(index.max())}")

    def log_sum_exp(self, x: Tensor, cut: str) -> Tensor:
        """Along a dimension that is cut, which keeps size 1; at least in float32 (see `runtime.log_sum_exp`)."""
        _, real, _, reduce = self._classes(cut)
        return log_sum_exp(x, parse_cuts(cut)[0].dim, real, reduce)

    def cross_entropy(
        self, logits: Tensor, target: Tensor, weight: Tensor | None, ignore: int, smoothing: float, cut: str
    ) -> tuple[Tensor, Tensor]:
        """Losses and log-sum-exps over classes that are cut (see `runtime.cross_entropy`)."""
        return cross_entropy.forward(logits, target, weight, ignore, smoothing, *self._classes(cut))

    def cross_entropy_backward(
        self, gradient: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, lse: Tensor, ignore: int,
        smoothing: float, cut: str,
    ) -> Tensor:  # fmt: skip
        return cross_entropy.backward(gradient, logits, target, weight, lse, ignore, smoothing, *self._classes(cut))

    def _classes(self, cut: str) -> tuple[int, int, int, Callable[[Tensor, str], Tensor]]:
        """(first class, real classes, all classes, reduction over the ranks that share them)."""
        (c,) = parse_cuts(cut)
        start, length = c.part(self.sizes, self.coords)
        real = min(max(c.count - start, 0), length)
        return start, real, c.count, lambda tensor, op: self.all_reduce(tensor, c.axes, op)

    @staticmethod
    def after(x: Tensor, written: Tensor) -> Tensor:
        """`x`, whose memory `written` shares, once that is written."""
        return x

    def rows(self, each: float, dtype: torch.dtype) -> Tensor:
        """`each` for every real row of the batch."""
        return torch.full((), each * self.real_rows, dtype=dtype, device=self.device)

    # -- randomness ----------------------------------------------------------------------------------------------

    def dropout_mask(self, local: tuple[int, ...], shape: tuple[int, ...], cuts: str, p: float, site: int) -> Tensor:
        """bool[local]: which elements of a value of global `shape` survive (see `runtime.random`)."""
        at = (shape, cuts, self.coords[TIME])
        if at not in self._index_cache:
            parsed = parse_cuts(cuts)
            self._index_cache[at] = [
                positions([c for c in parsed if c.dim == dim], size, self.sizes, self.coords, self.device)
                for dim, size in enumerate(shape)
            ]
        index = random.global_index(self._index_cache[at], shape)
        return random.keep_mask(index, p, random.key(self.seed, self.step, self.site + site))

    # -- kernels -------------------------------------------------------------------------------------------------

    attention = staticmethod(attention_kernels.attention)
    attention_backward = staticmethod(attention_kernels.attention_backward)

    def attention_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, documents: Tensor | None, *call: Any
    ) -> tuple[Tensor, Tensor]:
        """Attention where what a query sees depends on where it stands: see `runtime.split_attention`."""
        return split_attention.forward(self, self._planner, q, k, v, mask, documents, split_attention.Call(*call))

    def attention_blocks_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, documents: Tensor | None, out: Tensor,
        lse: Tensor, learns_mask: bool, *call: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        given = split_attention.Call(*call)
        return split_attention.backward(
            self, self._planner, grad, q, k, v, mask, documents, out, lse, given, learns_mask
        )

    def product_into(self, position: int, a: Tensor, b: Tensor) -> Tensor | None:
        """a @ b as gradient `position` of the running backward: written into its buffer (added if that holds earlier
        gradients of this step), or returned where the dtypes differ."""
        target = self.targets[position] if position < len(self.targets) else None
        if target is None or target[0].dtype != a.dtype:
            return torch.mm(a, b)
        view, first = target
        if first:
            torch.mm(a, b, out=view)
        else:
            view.addmm_(a, b)
        return None

    def opaque(
        self, name: str, call: str, operands: tuple[Tensor, ...], wanted: tuple[bool, ...]
    ) -> tuple[Tensor, ...]:
        """Run a module as it is (see `runtime.opaque`). The last result is a token for `opaque_backward`."""
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(w) for x, w in zip(operands, wanted)]
            results = call_opaque(self.opaque_modules[name], call, leaves)
        token = torch.tensor(max(self._tapes, default=-1) + 1, dtype=torch.int64)
        self._tapes[int(token)] = ([x for x, w in zip(leaves, wanted) if w], results)
        return (*[r.detach() for r in results], token)

    def opaque_backward(self, name: str, token: Tensor, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        """The gradients of the wanted operands."""
        leaves, results = self._tapes.pop(int(token))
        pairs = [(r, g) for r, g in zip(results, gradients) if g is not None and r.requires_grad]
        with torch.enable_grad():
            found = torch.autograd.grad([r for r, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
        return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found))


def stage_group(
    mesh: Mesh, rank: int, axes: tuple[str, ...], pipeline: str, stages: tuple[int, ...]
) -> tuple[int, ...]:
    """The ranks over `axes` that are on one of `stages`, where the pipeline's axis is among them."""
    return on_stages(mesh, mesh.group(rank, axes), axes, pipeline, stages)


def on_stages(
    mesh: Mesh, members: tuple[int, ...], axes: tuple[str, ...], pipeline: str, stages: tuple[int, ...]
) -> tuple[int, ...]:
    """Those of a group over `axes` that are on one of `stages`, where the pipeline's axis is among the axes."""
    return tuple(m for m in members if mesh.coords(m)[pipeline] in stages) if pipeline in axes and stages else members


def _extreme(dtype: torch.dtype, sign: int) -> float | int | bool:
    if dtype.is_floating_point:
        return sign * float("inf")
    if dtype == torch.bool:
        return sign > 0
    info = torch.iinfo(dtype)
    return info.max if sign > 0 else info.min
