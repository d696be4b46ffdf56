"""planc's data parallelism beside torch DDP: the same Llama, the same batches, 2 gloo processes, alternating steps.

    python -m tests.bench.ddp [--rounds 15] [--layers 4] [--dim 256]

Prints the median of the paired ratios of step times, peak memory of each side (in runs of their own) and the bytes
that each side's gradients put on the wire.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import runtime
from compiler.driver import compile
from compiler.dsl import loads
from runtime.transport.launch import launch
from tests.bench._paired import alternate, eager_model, random_batch, random_batches

RANKS = 2
OPTIMIZER = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
PLAN = """
model "dsl_examples.models.llama:Llama" {{ layers = {layers}, dim = {dim}, heads = 8, kv_heads = 4, vocab = 1024, context = {seq} }}
batch = {batch}
seq = {seq}
input tokens : int64[batch, seq]
input labels : int64[batch, seq]
mesh dp={ranks}
data over dp {{ tail = drop }}
optimizer adamw {{ lr = 1e-3, betas = (0.9, 0.95), weight_decay = 0.1 }}
"""

Step = Callable[[dict[str, torch.Tensor]], float]


def planc_step(folder: str) -> tuple[Step, Callable[[], int]]:
    session = runtime.load(folder)
    counters = session.transport.counters
    return lambda batch: session.step(batch).loss, lambda: counters["all_reduce"].bytes


def ddp_step(folder: str) -> tuple[Step, Callable[[], int]]:
    """The usual loop; gradient buckets are counted by a hook that does what DDP does without one."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    program = runtime.program.load(folder)
    model = eager_model(program)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    sent = [0]
    if os.environ.get("PLANC_BENCH_COUNT"):

        def counted(state, bucket):  # type: ignore[no-untyped-def]
            size = bucket.buffer().numel() * bucket.buffer().element_size()
            sent[0] += 2 * size * (RANKS - 1) // RANKS
            return allreduce_hook(None, bucket)

        wrapped.register_comm_hook(None, counted)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
    rank = dist.get_rank()

    def step(batch: dict[str, torch.Tensor]) -> float:
        part = {k: v.chunk(RANKS)[rank] for k, v in batch.items()}
        optimizer.zero_grad(set_to_none=True)
        loss = wrapped(**part)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
        return float(total) / RANKS

    return step, lambda: sent[0]


SIDES = {"planc": planc_step, "ddp": ddp_step}


def compare(folder: str, rounds: int) -> None:
    """Both sides, step by step in turn."""
    batches = random_batches(runtime.program.load(folder))
    found = alternate({name: make(folder)[0] for name, make in SIDES.items()}, batches, rounds)
    if dist.get_rank() == 0:
        print(f"step time, planc / DDP: {found.ratio('planc', 'ddp'):.3f} (median of {rounds} pairs)")
        found.show("planc", "ddp")


def alone(folder: str, side: str) -> None:
    """A few steps of one side: peak memory above what was there before the first, and bytes of one step."""
    program = runtime.program.load(folder)
    step, sent = SIDES[side](folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(random_batch(program, 0))
    once = sent()
    for k in range(3):
        step(random_batch(program, k))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if dist.get_rank() == 0:
        total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{side}: peak {total:.0f} MB, {grown:.0f} MB above start; {once / 1e6:.2f} MB sent by a rank each step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
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
    with tempfile.TemporaryDirectory() as scratch:
        folder = compile(loads(PLAN.format(ranks=RANKS, **sizes), "bench.plan")).write(Path(scratch) / "program")
        print(json.dumps(sizes))
        for what in ("compare", "planc", "ddp"):
            arguments = ["-m", "tests.bench.ddp", "--rounds", str(options.rounds), "--worker", what, str(folder)]
            env = {} if what == "compare" else {"PLANC_BENCH_COUNT": "1"}
            if launch(RANKS, arguments, env):
                sys.exit(1)


if __name__ == "__main__":
    main()
