"""planc's context parallelism beside torch's own and beside one device: the same Llama, the same long sequence.

    python -m tests.bench.context [--rounds 7] [--seq 8192] [--kind ring]

Two gloo processes, alternating steps. Prints the medians of the paired ratios of step times, the peak memory of each
side (in runs of their own), and by the memory reader what a rank holds of activations on 1, 2, 4 and 8 ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import runtime
from compiler.analysis.dry_run import dry_run
from compiler.analysis.memory import read_memory
from compiler.context.balance import imbalance, seen_by_rank
from compiler.driver import compile
from compiler.dsl import loads
from runtime.transport.launch import launch
from tests.bench._paired import WARM_UP, Batch, alternate, eager_model, random_batch, random_batches

RANKS = 2
PLAN = """
model "dsl_examples.models.llama:Llama" {{ layers = {layers}, dim = {dim}, heads = 4, kv_heads = 4, vocab = 256, context = {seq} }}
batch = 1
seq = {seq}
input tokens : int64[batch, seq]
input labels : int64[batch, seq]
mesh cp={ranks}
context over cp {{ attention = {kind}, order = {order} }}
optimizer sgd {{ lr = 1e-3 }}
"""

Step = Callable[[Batch], float]


def planc_step(folder: str) -> Step:
    session = runtime.load(folder)
    return lambda batch: session.step(batch).loss


def alone_step(folder: str) -> Step:
    """The whole sequence on each process by itself."""
    model = eager_model(runtime.program.load(folder))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def torch_step(folder: str) -> Step:
    """torch's ring attention: its context manager cuts inputs and rotary tables in place, and replaces attention."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    model = eager_model(runtime.program.load(folder))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mesh = init_device_mesh("cpu", (RANKS,))

    def step(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=True)
        batch = {name: tensor.clone() for name, tensor in batch.items()}
        buffers = [*batch.values(), model.cos, model.sin]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0, 0]):
            loss = model(**batch)
            loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(RANKS)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / RANKS

    return step


SIDES = {"planc": planc_step, "torch": torch_step, "one device": alone_step}


def compare(folder: str, rounds: int) -> None:
    """Alternate the sides step by step. The one device runs on rank 0 while the other process waits."""
    program = runtime.program.load(folder)
    steps: dict[str, Step] = {"planc": planc_step(folder)}
    for name in ("torch", "one device"):
        try:
            step = SIDES[name](folder)
            if name == "torch":
                step(random_batch(program, 0))  # whether it runs here at all
                step = SIDES[name](folder)
            steps[name] = step
        except (ImportError, RuntimeError, NotImplementedError, AssertionError) as error:
            if dist.get_rank() == 0:
                print(f"{name} does not run here: {type(error).__name__}: {str(error).splitlines()[0]}")
    if dist.get_rank() and "one device" in steps:
        steps["one device"] = lambda batch: math.nan
    found = alternate(steps, random_batches(program), rounds)
    spent: list[float] = [0.0] * RANKS
    dist.all_gather_object(spent, statistics.median(found.work["planc"][WARM_UP:]))
    if dist.get_rank() == 0:
        even = max(spent) / statistics.mean(spent)
        each = ", ".join(f"{seconds:.2f}" for seconds in spent)
        print(f"processor time of planc's ranks {each} s a step: the most {even:.2f} times the mean")
        for name in list(steps)[1:]:
            print(f"step time, planc / {name}: {found.ratio('planc', name):.3f} (median of {rounds} pairs)")
            found.show("planc", name)


def alone(folder: str, side: str) -> None:
    """A few steps of one side: peak memory above what was there before the first."""
    program = runtime.program.load(folder)
    try:
        step = SIDES[side](folder)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for k in range(2):
            step(random_batch(program, k))
    except (ImportError, RuntimeError, NotImplementedError, AssertionError):
        return
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if int(os.environ["RANK"]) == 0:
        print(f"{side}: peak memory of a process {grown:.0f} MB above start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    for name, default in (("layers", 2), ("dim", 128), ("seq", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kind", default="ring", choices=("ring", "gather", "ulysses"))
    parser.add_argument("--order", default="zigzag", choices=("zigzag", "contiguous"))
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        what, folder = options.worker
        if what != "planc" and not dist.is_initialized() and what != "compare":
            dist.init_process_group("gloo")
        compare(folder, options.rounds) if what == "compare" else alone(folder, what)
        dist.destroy_process_group()
        return
    sizes = {name: getattr(options, name) for name in ("layers", "dim", "seq", "kind", "order")}
    print(json.dumps(sizes))
    orders = {"contiguous": "", "zigzag": "zigzag"}
    predicted = {name: imbalance(seen_by_rank(options.seq, RANKS, o, True)) for name, o in orders.items()}
    print(f"predicted: attention of the busiest rank over the mean, {predicted}")
    for ranks in (1, 2, 4, 8):
        held = read_memory(dry_run(compile(loads(PLAN.format(ranks=ranks, **sizes), "bench.plan"))))
        print(f"cp={ranks}: peak of a rank {held.peak.bytes / 1e6:.1f} MB: {dict(held.peak.categories)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = compile(loads(PLAN.format(ranks=RANKS, **sizes), "bench.plan")).write(Path(scratch) / "program")
        for what in ("compare", *SIDES):
            arguments = ["-m", "tests.bench.context", "--rounds", str(options.rounds), "--worker", what, str(folder)]
            if launch(RANKS, arguments, {}):
                sys.exit(1)


if __name__ == "__main__":
    main()
