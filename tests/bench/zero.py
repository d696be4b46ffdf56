"""planc's ZeRO beside torch's: the same Llama, the same batches, 2 gloo processes, alternating steps.

    python -m tests.bench.zero [--stages 123] [--compute bf16] [--rounds 15] [--layers 4] [--dim 256]

Stage 1 stands beside DDP with ZeroRedundancyOptimizer, stage 2 beside FSDP2 that keeps parameters whole from the
forward to the backward, stage 3 beside FSDP2 that gathers them again. Prints the median of the paired ratios of step
times, peak memory of each side (in runs of their own: resident memory during steps, above that of a process without a
model) and the bytes that each side's collectives send in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import runtime
from compiler.driver import compile
from compiler.dsl import loads
from runtime.factory import build
from runtime.initial import initial_state
from runtime.transport import connect
from runtime.transport.calls import sent_bytes
from runtime.transport.launch import launch
from tests.bench._paired import alternate, random_batches

RANKS = 2
OPTIMIZER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
PLAN = """
model "dsl_examples.models.llama:Llama" {{ layers = {layers}, dim = {dim}, heads = 8, kv_heads = 4, vocab = 1024, context = {seq} }}
batch = {batch}
seq = {seq}
input tokens : int64[batch, seq]
input labels : int64[batch, seq]
mesh dp={ranks}
data over dp {{ tail = drop }}
zero over dp {{ stage = {stage}, bucket = {bucket}B }}
{precision}
optimizer adamw {{ lr = 1e-3, betas = (0.9, 0.95), weight_decay = 0.1 }}
"""
PRECISION = {"fp32": "", "bf16": "precision { compute = bf16, reduce = bf16, master = fp32 }"}
PEERS = {1: "DDP + ZeroRedundancyOptimizer", 2: "FSDP2, whole to the backward", 3: "FSDP2"}
# Large blocks are the system's again as soon as they are free, so that resident memory is what is alive.
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "PLANC_BENCH_COUNT": "1"}

Step = Callable[[dict[str, torch.Tensor]], float]
Side = Callable[[runtime.Program, runtime.transport.Transport], tuple[Step, Callable[[], int]]]


def planc_side(program: runtime.Program, transport: runtime.transport.Transport) -> tuple[Step, Callable[[], int]]:
    session = runtime.Session(program, transport)
    counters = transport.counters
    counters.reset()
    return lambda batch: session.step(batch).loss, lambda: counters.total.bytes


def torch_side(program: runtime.Program, transport: runtime.transport.Transport) -> tuple[Step, Callable[[], int]]:
    """The usual loop; parameters in float32, computation and sums in the plan's dtype."""
    stage = max(bucket.zero for bucket in program.buckets)
    low = any(bucket.master for bucket in program.buckets)
    model = build(program.model["factory"], program.model["options"], program.model.get("base"))
    model.load_state_dict(initial_state(program, 0), strict=False)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    sent = [0]
    if stage == 1:
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **OPTIMIZER
        )
        # The all-reduce of the gradients, and each rank's part of the parameters to all others.
        every_step = sent_bytes("all_reduce", RANKS, whole) + sent_bytes("broadcast", RANKS, whole)
    else:
        mesh = init_device_mesh("cpu", (RANKS,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if low else MixedPrecisionPolicy()
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=stage == 3, mp_policy=policy)
        wrapped, every_step = model, 0
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
    rank = dist.get_rank()

    def step(batch: dict[str, torch.Tensor]) -> float:
        part = {k: v.chunk(RANKS)[rank] for k, v in batch.items()}
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16) if low and stage == 1 else nullcontext():
            loss = wrapped(**part)
        loss.backward()
        optimizer.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        return float(total) / RANKS

    def counted(batch: dict[str, torch.Tensor]) -> float:
        sent[0] += every_step
        with Sent(sent) if not every_step else nullcontext():
            return step(batch)

    return (counted if os.environ.get("PLANC_BENCH_COUNT") else step), lambda: sent[0]


class Sent(TorchDispatchMode):
    """Counts what collectives send, as bandwidth-optimal algorithms would."""

    def __init__(self, sent: list[int]):
        super().__init__()
        self.sent = sent

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kind = {"c10d::_allgather_base_": "all_gather", "c10d::_reduce_scatter_base_": "reduce_scatter"}.get(
            func._schema.name
        )
        if kind is not None:
            self.sent[0] += sent_bytes(kind, RANKS, max(args[0].nbytes, args[1].nbytes))
        return func(*args, **(kwargs or {}))


SIDES: dict[str, Side] = {"planc": planc_side, "torch": torch_side}


def compare(folder: str, rounds: int) -> None:
    """Both sides, step by step in turn."""
    program, transport = runtime.program.load(folder), connect()
    steps = {name: make(program, transport)[0] for name, make in SIDES.items()}
    found = alternate(steps, random_batches(program), rounds)
    if dist.get_rank() == 0:
        print(f"  step time, planc / torch: {found.ratio('planc', 'torch'):.3f} (median of {rounds} pairs)")
        found.show("planc", "torch")


def resident(field: str) -> float:
    """A field of the process's status in MB: `VmRSS` now, `VmHWM` the most since `forget_peak`."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def alone(folder: str, side: str) -> None:
    """A few steps of one side: memory between steps and at the peak, and bytes of one step."""
    program, transport = runtime.program.load(folder), connect()
    batches = random_batches(program, 3)
    before = resident("VmRSS")
    step, sent = SIDES[side](program, transport)
    step(batches[0])
    once = sent()
    for batch in batches:
        resting = resident("VmRSS") - before
        forget_peak()
        step(batch)
    if dist.get_rank() == 0:
        peak = resident("VmHWM") - before
        print(
            f"  {side}: {resting:.0f} MB between steps, {peak:.0f} MB at the peak; {once / 1e6:.2f} MB sent by a rank each step"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--stages", default="123", help="digits")
    parser.add_argument("--compute", choices=PRECISION, default="fp32")
    for name, default in (("layers", 4), ("dim", 256), ("seq", 128), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        what, folder = options.worker
        compare(folder, options.rounds) if what == "compare" else alone(folder, what)
        dist.destroy_process_group()
        return
    sizes = {name: getattr(options, name) for name in ("layers", "dim", "seq", "batch")}
    print(json.dumps(sizes | {"compute": options.compute}))
    with tempfile.TemporaryDirectory() as scratch:
        for stage in map(int, options.stages):
            bucket = 4 * 12 * options.dim**2  # a layer, which is what FSDP2 gathers at once
            text = PLAN.format(ranks=RANKS, stage=stage, bucket=bucket, precision=PRECISION[options.compute], **sizes)
            folder = compile(loads(text, "bench.plan")).write(Path(scratch) / f"zero{stage}")
            print(f"ZeRO {stage} and {PEERS[stage]}", flush=True)
            for what in ("compare", *SIDES):
                arguments = ["-m", "tests.bench.zero", "--rounds", str(options.rounds), "--worker", what, str(folder)]
                if launch(RANKS, arguments, {} if what == "compare" else EXACT):
                    sys.exit(1)


if __name__ == "__main__":
    main()
