"""Sides of the ZeRO bench: planc, and torch's own; DeepSpeed's is in `_deepspeed.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import runtime
from runtime.program import Program
from runtime.transport import Transport
from runtime.transport.calls import sent_bytes
from tests.bench._paired import eager_model

OPTIMIZER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
COUNT = "PLANC_BENCH_COUNT"  # set in a run whose bytes are counted, which takes time
KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::reduce_": "reduce_scatter",  # half an all-reduce, whichever rank it is for
    "c10d::broadcast_": "broadcast",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
}
"""Of torch's operators, as `sent_bytes` knows them."""

Step = Callable[[dict[str, torch.Tensor]], float]
Side = Callable[[Program, Transport], tuple[Step, Callable[[], int]]]
"""Makes a step, whose loss is the mean over the ranks, and what tells the bytes that this rank has sent so far."""


def planc_side(program: Program, transport: Transport) -> tuple[Step, Callable[[], int]]:
    session = runtime.Session(program, transport)
    counters = transport.counters
    counters.reset()
    return lambda batch: session.step(batch).loss, lambda: counters.total.bytes


def torch_side(program: Program, transport: Transport) -> tuple[Step, Callable[[], int]]:
    """The usual loop; parameters in float32, computation and sums in the plan's dtype."""
    model, stage, low = eager_model(program), zero_stage(program), low_precision(program)
    if stage == 1:
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **OPTIMIZER
        )
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if low else MixedPrecisionPolicy()
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=stage == 3, mp_policy=policy)
        wrapped = model
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)

    def step(part: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16) if low and stage == 1 else nullcontext():
            loss = wrapped(**part)
        loss.backward()
        optimizer.step()
        return loss

    return over_ranks(step)


def zero_stage(program: Program) -> int:
    return max(bucket.zero for bucket in program.buckets)


def low_precision(program: Program) -> bool:
    """Whether the computation is in bfloat16, beside float32 masters."""
    return any(bucket.master for bucket in program.buckets)


def over_ranks(step: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> tuple[Step, Callable[[], int]]:
    """A side of `step`, which takes this rank's part of a batch and returns its loss."""
    sent = [0]

    def whole(batch: dict[str, torch.Tensor]) -> float:
        ranks = dist.get_world_size()
        with Sent(sent) if os.environ.get(COUNT) else nullcontext():
            loss = step({k: v.chunk(ranks)[dist.get_rank()] for k, v in batch.items()})
        total = loss.detach().double()
        dist.all_reduce(total)
        return float(total) / ranks

    return whole, lambda: sent[0]


class Sent(TorchDispatchMode):
    """Counts what collectives send, as bandwidth-optimal algorithms would, evenly shared by the ranks."""

    def __init__(self, sent: list[int]):
        super().__init__()
        self.sent = sent

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func._schema.name
        if name in KINDS:
            full = max(sum(t.nbytes for t in tree_leaves(a) if isinstance(t, torch.Tensor)) for a in args)
            self.sent[0] += sent_bytes(KINDS[name], dist.get_world_size(), full)
        elif name.startswith("c10d::") and "barrier" not in name:
            raise NotImplementedError(f"the bench does not count {name}")
        return func(*args, **(kwargs or {}))
