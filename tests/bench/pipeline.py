"""planc's pipelines beside torch.distributed.pipelining: the same Llama, the same stages, the same batches, 2 gloo
processes, alternating steps.

    python -m tests.bench.pipeline [--schedules 1f1b interleaved] [--rounds 15] [--layers 8] [--dim 256] [--parts 8]

Torch's side has the layers of each stage in a module of its own, by hand. Prints the median of the paired ratios of step
times and, for each rank in runs of their own, the most bytes of tensors that are alive in a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import runtime
from compiler.driver import compile
from compiler.dsl import loads
from runtime.transport.launch import launch
from tests.analysis.tracking import Storages
from tests.bench._paired import Batch, alternate, eager_model, random_batch, random_batches

RANKS = 2
VIRTUAL = {"1f1b": 1, "interleaved": 2}
OPTIMIZER = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
PLAN = """
model "dsl_examples.models.llama:Llama" {{ layers = {layers}, dim = {dim}, heads = 8, kv_heads = 4, vocab = 1024, context = {seq} }}
batch = {batch}
seq = {seq}
input tokens : int64[batch, seq]
input labels : int64[batch, seq]
mesh pp={ranks}
pipeline over pp {{ schedule = {schedule}, microbatches = {parts}, virtual = {virtual}, split before {before} }}
optimizer adamw {{ lr = 1e-3, betas = (0.9, 0.95), weight_decay = 0.1 }}
"""

Step = Callable[[Batch], float]


def cuts(layers: int, stages: int) -> list[int]:
    """The first layer of each stage."""
    return [layers * k // stages for k in range(stages)]


def planc_step(folder: str, schedule: str) -> Step:
    session = runtime.load(folder)
    return lambda batch: session.step(batch).loss


class Part(nn.Module):
    """A stage of a Llama: layers [first, last), the embedding before the first one, norm and head behind the last."""

    def __init__(self, model: nn.Module, first: int, last: int) -> None:
        super().__init__()
        self.embed = model.embed if first == 0 else None
        self.layers = model.layers[first:last]
        self.norm, self.head = (model.norm, model.head) if last == len(model.layers) else (None, None)
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def torch_step(folder: str, schedule: str) -> Step:
    """The usual loop: no label is left out, so the mean over micro-batches is the mean over the batch."""
    program = runtime.program.load(folder)
    model = eager_model(program)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, count = dist.get_rank(), RANKS * VIRTUAL[schedule]
    edges = [*cuts(len(model.layers), count), len(model.layers)]
    spans = list(itertools.pairwise(edges))
    stages = [PipelineStage(Part(model, *spans[k]), k, count, torch.device("cpu")) for k in range(rank, count, RANKS)]
    if schedule == "1f1b":
        pipeline = Schedule1F1B(stages[0], program.microbatches, loss_fn=loss_of)
    else:
        pipeline = ScheduleInterleaved1F1B(stages, program.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for s in stages for p in s.submod.parameters()], fused=True, **OPTIMIZER)
    has_first, has_last = rank == 0, rank == (count - 1) % RANKS

    def step(batch: Batch) -> float:
        losses: list[Tensor] = []
        optimizer.zero_grad(set_to_none=True)
        given = (batch["tokens"],) if has_first else ()
        labels = {"target": batch["labels"], "losses": losses} if has_last else {}
        pipeline.step(*given, return_outputs=False, **labels)
        optimizer.step()
        loss = torch.stack(losses).mean().detach() if has_last else torch.zeros(())
        dist.all_reduce(loss)
        return float(loss)

    return step


SIDES = {"planc": planc_step, "torch": torch_step}


def compare(folder: str, schedule: str, rounds: int) -> None:
    """Both sides, step by step in turn."""
    batches = random_batches(runtime.program.load(folder))
    found = alternate({name: make(folder, schedule) for name, make in SIDES.items()}, batches, rounds)
    if dist.get_rank() == 0:
        ratio = found.ratio("planc", "torch")
        print(f"{schedule}: step time, planc / torch: {ratio:.3f} (median of {rounds} pairs)")
        found.show("planc", "torch")


def alone(folder: str, schedule: str, side: str) -> None:
    """Steps of one side: the bytes of all tensors that are alive between steps, and the most within one."""
    program = runtime.program.load(folder)
    with Storages(()) as storages:
        step = SIDES[side](folder, schedule)
        for k in range(2):
            step(random_batch(program, k))
        resting = storages.most = storages.now
        step(random_batch(program, 2))
    found = [None] * RANKS
    dist.all_gather_object(found, (resting, storages.most))
    if dist.get_rank() == 0:
        ranks = "; ".join(
            f"rank {k} {most / 1e6:.1f} MB, {rest / 1e6:.1f} at rest" for k, (rest, most) in enumerate(found)
        )
        print(f"  {side}: peak of {ranks}")


def measure(schedule: str, sizes: dict[str, int], rounds: int) -> bool:
    """Both sides on one schedule. False if a process failed."""
    before = ", ".join(f'"layers.{k}"' for k in cuts(sizes["layers"], RANKS * VIRTUAL[schedule])[1:])
    text = PLAN.format(ranks=RANKS, schedule=schedule, virtual=VIRTUAL[schedule], before=before, **sizes)
    with tempfile.TemporaryDirectory() as scratch:
        folder = compile(loads(text, "bench.plan")).write(Path(scratch) / "program")
        for what in ("compare", *SIDES):
            arguments = ["-m", "tests.bench.pipeline", "--rounds", str(rounds), "--worker", what, schedule, str(folder)]
            if launch(RANKS, arguments, {}):
                return False
    return True


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="*", choices=list(VIRTUAL), default=list(VIRTUAL))
    parser.add_argument("--rounds", type=int, default=15)
    for name, default in (("layers", 8), ("dim", 256), ("seq", 128), ("batch", 16), ("parts", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    if options.worker:
        what, schedule, folder = options.worker
        compare(folder, schedule, options.rounds) if what == "compare" else alone(folder, schedule, what)
        dist.destroy_process_group()
        return
    sizes = {name: getattr(options, name) for name in ("layers", "dim", "seq", "batch", "parts")}
    print(json.dumps(sizes))
    if not all(measure(schedule, sizes, options.rounds) for schedule in options.schedules):
        sys.exit(1)


if __name__ == "__main__":
    main()
