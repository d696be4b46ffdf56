"""planc's context parallelism beside torch's own and beside one device: the same Llama, the same long sequence.

    python -m tests.bench.context [--rounds 7] [--seq 8192] [--kind ring]

Two gloo processes, alternating steps. Prints the medians of the paired ratios of step times, the peak memory of each
side (in runs of their own), and by the memory reader what a rank holds of activations on 1, 2, 4 and 8 ranks.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
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
from runtime.factory import build
from runtime.initial import initial_state
from runtime.transport.launch import launch
from tests.bench._paired import Batch, random_batch

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


def model_of(folder: str) -> torch.nn.Module:
    program = runtime.program.load(folder)
    model = build(program.model["factory"], program.model["options"], program.model.get("base"))
    model.load_state_dict(initial_state(program, 0), strict=False)
    return model


def alone_step(folder: str) -> Step:
    """The whole sequence on each process by itself."""
    model = model_of(folder)
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

    model = model_of(folder)
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
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    work: list[float] = []  # of this process, in planc's steps
    for turn in range(rounds + 1):
        for name in list(steps) if turn % 2 else list(steps)[::-1]:
            dist.barrier()
            start = time.perf_counter()
            began = time.process_time()
            if name != "one device" or dist.get_rank() == 0:
                losses[name].append(steps[name](random_batch(program, turn)))
            if name == "planc" and turn:
                work.append(time.process_time() - began)
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    spent: list[float] = [0.0] * RANKS
    dist.all_gather_object(spent, statistics.median(work))
    if dist.get_rank() == 0:
        even = max(spent) / statistics.mean(spent)
        print(
            f"processor time of the ranks {', '.join(f'{s:.2f}' for s in spent)} s a step: the most {even:.2f} times the mean"
        )
        for name, each in times.items():
            ratio = statistics.median(a / b for a, b in zip(times["planc"][1:], each[1:]))
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses["planc"], losses[name]))
            print(
                f"{name}: median {statistics.median(each[1:]) * 1e3:.0f} ms a step; planc / {name}: {ratio:.3f} "
                f"(median of {rounds} pairs); largest relative difference of the losses {worst:.1e}"
            )


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
    print(sizes)
    predicted = {o: imbalance(seen_by_rank(options.seq, RANKS, o, True)) for o in ("contiguous", "zigzag")}
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
