"""planc's tensor parallelism beside torch's DTensor: the same Llama, the same batches, 2 gloo processes, alternating steps.

    python -m tests.bench.tensor [--rounds 15] [--layers 4] [--dim 256] [--sequence on]

Both cut the same layers over the same ranks, with a loss over a vocabulary that stays cut. Prints the median of the
paired ratios of step times, peak memory of each side (in runs of their own) and the bytes that each side's collectives
move in a step.
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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

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
mesh tp={ranks}
tensor over tp {{
    column "layers.*.attn.w[qkv]", "layers.*.mlp.w[13]"
    row    "layers.*.attn.wo", "layers.*.mlp.w2"
    vocab  "embed", "head"
    sequence = {sequence}
}}
optimizer adamw {{ lr = 1e-3, betas = (0.9, 0.95), weight_decay = 0.1 }}
"""

Step = Callable[[dict[str, torch.Tensor]], float]
Counter = Callable[[], dict[str, int]]


def planc_step(folder: str, sequence: bool) -> tuple[Step, Counter]:
    session = runtime.load(folder)
    counters = session.transport.counters
    counters.reset()  # what initialising sent is no part of a step
    return lambda batch: session.step(batch).loss, lambda: {k: c.bytes for (k, _), c in counters.by_group().items()}


def dtensor_step(folder: str, sequence: bool) -> tuple[Step, Counter]:
    """The usual loop over a model that `parallelize_module` has cut; parameters that it leaves alone are replicated."""
    program = runtime.program.load(folder)
    model = eager_model(program)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    cut(model, init_device_mesh("cpu", (RANKS,)), sequence)
    parameters = list(model.parameters())
    groups = [p for p in parameters if isinstance(p, DTensor)], [p for p in parameters if not isinstance(p, DTensor)]
    optimizers = [torch.optim.AdamW(group, fused=True, **OPTIMIZER) for group in groups if group]
    sent: dict[str, int] = {}

    def step(batch: dict[str, torch.Tensor]) -> float:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        with loss_parallel():
            loss = model(**batch)
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return float((loss.full_tensor() if isinstance(loss, DTensor) else loss).detach())

    def counted(batch: dict[str, torch.Tensor]) -> float:
        with Sent(sent):
            return step(batch)

    return (counted if os.environ.get("PLANC_BENCH_COUNT") else step), lambda: sent


class Sent(TorchDispatchMode):
    """Counts the bytes that a rank sends in functional collectives, each as a bandwidth-optimal algorithm would."""

    def __init__(self, sent: dict[str, int]):
        super().__init__()
        self.sent = sent

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and isinstance(args[0], torch.Tensor):
            name = func._schema.name.rpartition("::")[2]
            size = args[0].numel() * args[0].element_size()
            factors = {"all_reduce": 2 / RANKS, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1 / RANKS}
            if name in factors:
                self.sent[name] = self.sent.get(name, 0) + int(size * factors[name] * (RANKS - 1))
        return func(*args, **(kwargs or {}))


def cut(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    """As torch's documentation has it for a Llama."""
    outside = Shard(1) if sequence else Replicate()
    top = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "head": ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False),
    }
    layer = {f"attn.w{k}": ColwiseParallel() for k in "qkv"} | {f"mlp.w{k}": ColwiseParallel() for k in "13"}
    layer |= {name: RowwiseParallel(output_layouts=outside) for name in ("attn.wo", "mlp.w2")}
    # One gather or, backward, one sum for all projections that read the same activation.
    for name, others in (("attn", (None, None, None)), ("mlp", ())):
        given, wanted = (outside, *others), (Replicate(), *others)
        layer[name] = PrepareModuleInput(input_layouts=given, desired_input_layouts=wanted)
    if sequence:
        top["norm"] = SequenceParallel()
        layer |= {"attn_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
    parallelize_module(model, mesh, top)
    for block in model.layers:
        parallelize_module(block, mesh, layer)


SIDES = {"planc": planc_step, "dtensor": dtensor_step}


def compare(folder: str, rounds: int, sequence: bool) -> None:
    """Both sides, step by step in turn."""
    batches = random_batches(runtime.program.load(folder))
    found = alternate({name: make(folder, sequence)[0] for name, make in SIDES.items()}, batches, rounds)
    if dist.get_rank() == 0:
        print(f"planc is {found.ratio('dtensor', 'planc'):.2f} times as fast (median of {rounds} pairs)")
        found.show("planc", "dtensor")


def alone(folder: str, side: str, sequence: bool) -> None:
    """A few steps of one side: peak memory above what was there before the first, and bytes of one step."""
    program = runtime.program.load(folder)
    step, sent = SIDES[side](folder, sequence)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(random_batch(program, 0))
    once = dict(sent())
    for k in range(3):
        step(random_batch(program, k))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if dist.get_rank() == 0:
        shown = ", ".join(f"{kind} {size / 1e6:.2f}" for kind, size in sorted(once.items()))
        total = sum(once.values()) / 1e6
        print(f"  {side}: {grown:.0f} MB above start; {total:.2f} MB sent by a rank each step ({shown})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sequence", choices=("on", "off", "both"), default="both")
    for name, default in (("layers", 4), ("dim", 256), ("seq", 128), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sequence = options.sequence == "on"
    if options.worker:
        what, folder = options.worker
        compare(folder, options.rounds, sequence) if what == "compare" else alone(folder, what, sequence)
        dist.destroy_process_group()
        return
    sizes = {name: getattr(options, name) for name in ("layers", "dim", "seq", "batch")}
    for mode in ("off", "on") if options.sequence == "both" else (options.sequence,):
        with tempfile.TemporaryDirectory() as scratch:
            plan = loads(PLAN.format(ranks=RANKS, sequence=mode, **sizes), "bench.plan")
            folder = compile(plan).write(Path(scratch) / "program")
            print(json.dumps(sizes | {"sequence": mode}), flush=True)
            for what in ("compare", *SIDES):
                arguments = ["-m", "tests.bench.tensor", "--rounds", str(options.rounds), "--sequence", mode]
                env = {} if what == "compare" else {"PLANC_BENCH_COUNT": "1"}
                if launch(RANKS, [*arguments, "--worker", what, str(folder)], env):
                    sys.exit(1)


if __name__ == "__main__":
    main()
