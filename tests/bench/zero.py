"""planc's ZeRO beside torch's: the same Llama, the same batches, 2 gloo processes, alternating steps.

    python -m tests.bench.zero [--stages 123] [--compute bf16] [--rounds 15] [--layers 4] [--dim 256]

Stage 1 stands beside DDP with ZeroRedundancyOptimizer, stage 2 beside FSDP2 that keeps parameters whole from the
forward to the backward, stage 3 beside FSDP2 that gathers them again; each also beside DeepSpeed's, if that is
installed. Prints the median of the paired ratios of step times and of processor times (which what else runs on the
machine does not reach), peak memory of each side (in runs of their own: resident memory during steps, above that of a
process without a model) and the bytes that each side's collectives send in a step.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

import runtime
from compiler.driver import compile
from compiler.dsl import loads
from runtime.transport import connect
from runtime.transport.launch import launch
from tests.bench._paired import alternate, random_batches
from tests.bench._zero import COUNT, Side, planc_side, torch_side

RANKS = 2
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
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", COUNT: "1"}


def side(name: str) -> Side:
    """DeepSpeed is imported where it runs alone: that changes torch."""
    if name == "deepspeed":
        from tests.bench._deepspeed import deepspeed_side

        return deepspeed_side
    return {"planc": planc_side, "torch": torch_side}[name]


def compare(folder: str, peer: str, rounds: int) -> None:
    """planc and a peer, step by step in turn."""
    program, transport = runtime.program.load(folder), connect()
    steps = {name: side(name)(program, transport)[0] for name in ("planc", peer)}
    found = alternate(steps, random_batches(program), rounds)
    if dist.get_rank() == 0:
        ratio, work = found.ratio("planc", peer), found.ratio("planc", peer, work=True)
        print(f"  planc / {peer}: step time {ratio:.3f}, processor time {work:.3f} (medians of {rounds} pairs)")
        found.show("planc", peer)


def resident(field: str) -> float:
    """A field of the process's status in MB: `VmRSS` now, `VmHWM` the most since `forget_peak`."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def alone(folder: str, name: str) -> None:
    """A few steps of one side: memory between steps and at the peak, and bytes of one step."""
    program, transport, make = runtime.program.load(folder), connect(), side(name)
    batches = random_batches(program, 3)
    before = resident("VmRSS")
    step, sent = make(program, transport)
    step(batches[0])
    once = sent()
    for batch in batches:
        resting = resident("VmRSS") - before
        forget_peak()
        step(batch)
    if dist.get_rank() == 0:
        peak = resident("VmHWM") - before
        print(
            f"  {name}: {resting:.0f} MB between steps, {peak:.0f} MB at the peak; {once / 1e6:.2f} MB sent by a rank each step"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--stages", default="123", help="digits")
    parser.add_argument("--compute", choices=PRECISION, default="fp32")
    for name, default in (("layers", 4), ("dim", 256), ("seq", 128), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--worker", nargs=3, metavar=("WHAT", "SIDE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        what, name, folder = options.worker
        compare(folder, name, options.rounds) if what == "compare" else alone(folder, name)
        dist.destroy_process_group()
        return
    peers = ["torch"] + ["deepspeed"] * (find_spec("deepspeed") is not None)
    sizes = {name: getattr(options, name) for name in ("layers", "dim", "seq", "batch")}
    print(json.dumps(sizes | {"compute": options.compute}))
    if "deepspeed" not in peers:
        print("without DeepSpeed, which is not installed: pip install 'planc[deepspeed]'")
    with tempfile.TemporaryDirectory() as scratch:
        for stage in map(int, options.stages):
            bucket = 4 * 12 * options.dim**2  # a layer, which is what FSDP2 gathers at once
            text = PLAN.format(ranks=RANKS, stage=stage, bucket=bucket, precision=PRECISION[options.compute], **sizes)
            folder = str(compile(loads(text, "bench.plan")).write(Path(scratch) / f"zero{stage}"))
            print(f"ZeRO {stage}; torch's is {PEERS[stage]}", flush=True)
            runs = [("compare", peer) for peer in peers] + [("alone", name) for name in ("planc", *peers)]
            for what, name in runs:
                arguments = ["-m", "tests.bench.zero", "--rounds", str(options.rounds), "--worker", what, name, folder]
                if launch(RANKS, arguments, EXACT if what == "alone" else {}):
                    sys.exit(1)


if __name__ == "__main__":
    main()
