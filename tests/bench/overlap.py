"""Overlap inside segments: the recorded order, communication behind products (the default), and in pieces
(`overlap = on`), on the same Llama and batches in 2 gloo processes, alternating steps.

    python -m tests.bench.overlap [--rounds 15] [--sequence on] [--bandwidth 200MB/s]

Prints medians of step times, and of their ratios to the recorded order's step beside them, also in processor time (of all
threads of a rank), which other processes on the machine disturb less. `--bandwidth` emulates a slower
link: a collective is not done before its bytes have crossed it, during which the processor is free, as it is beside a
real network or an accelerator. Without it, on one machine, messages take the processor that products need.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

import runtime
from compiler.driver import compile
from compiler.dsl import loads
from compiler.dsl.strings import parse_link
from compiler.overlap.segment import Overlap
from runtime.transport import Work
from runtime.transport.calls import Call
from runtime.transport.launch import launch
from runtime.transport.torch_distributed import TorchTransport
from tests.bench._paired import alternate, random_batches

RANKS = 2
SIDES = ("recorded", "behind", "pieces")
PLAN = """
model "dsl_examples.models.llama:Llama" {{ layers = {layers}, dim = {dim}, heads = 8, kv_heads = 8, vocab = 1024, context = {seq} }}
input tokens : int64[{batch}, {seq}]
input labels : int64[{batch}, {seq}]
mesh tp={ranks}
tensor over tp {{ column "layers.*.attn.w[qkv]", "layers.*.mlp.w[13]"
    row "layers.*.attn.wo", "layers.*.mlp.w2"
    vocab "embed", "head"
    style = manual, sequence = {sequence}, overlap = {overlap} }}
optimizer adamw {{ lr = 1e-3 }}
"""


class SlowTransport(TorchTransport):
    """Its collectives cross one link of `bandwidth` bytes per second, one after the other."""

    bandwidth = math.inf
    _free = 0.0

    def _issue(self, call: Call, start: Callable, finish: Callable | None = None) -> Work:
        full = math.prod(call.shape) * (call.dtype.itemsize if call.dtype is not None else 0)
        if call.kind == "all_gather":
            full *= len(call.group)
        share = (len(call.group) - 1) / len(call.group) * (2 if call.kind == "all_reduce" else 1)
        self._free = max(self._free, time.perf_counter()) + full * share / self.bandwidth
        return _Arriving(super()._issue(call, start, finish), self._free)


class _Arriving(Work):
    def __init__(self, work: Work, at: float):
        self._work, self._at = work, at

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._at - time.perf_counter()))


def compare(folder: Path, rounds: int, bandwidth: float) -> None:
    """All sides, step by step in turn."""
    SlowTransport.bandwidth = bandwidth
    transport = SlowTransport.from_env("gloo")
    sessions = {side: runtime.load(folder / side, transport) for side in SIDES}
    batches = random_batches(next(iter(sessions.values())).program)
    found = alternate({side: lambda batch, s=session: s.step(batch).loss for side, session in sessions.items()}, batches, rounds)
    if transport.rank == 0:
        for side in SIDES:
            wall, processor = (found.ratio(side, "recorded", work) for work in (False, True))
            worst = found.apart(side, "recorded")
            print(
                f"  {side:9} {found.median(side):7.1f} ms, ratio {wall:.3f}, of processor time {processor:.3f}; "
                f"losses {worst:.0e} apart"
            )
    transport.close()


def programs(options: argparse.Namespace, folder: Path) -> None:
    sizes = {name: getattr(options, name) for name in ("layers", "dim", "seq", "batch", "sequence")}
    print(json.dumps(sizes), f"bandwidth {options.bandwidth or 'of this machine'}")
    for side in SIDES:
        plan = loads(PLAN.format(ranks=RANKS, overlap="on" if side == "pieces" else "off", **sizes), "bench.plan")
        same = mock.patch.object(Overlap, "code", lambda self, code: code) if side == "recorded" else mock.MagicMock()
        with same:
            compile(plan).write(folder / side)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 15), ("layers", 4), ("dim", 256), ("seq", 128), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sequence", choices=("on", "off"), default="off")
    parser.add_argument("--bandwidth", help="as plans write it: 200MB/s")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        link = parse_link(options.bandwidth) if options.bandwidth else None
        compare(options.worker, options.rounds, link.bandwidth if link else math.inf)
        return
    with tempfile.TemporaryDirectory() as scratch:
        programs(options, Path(scratch))
        arguments = ["-m", "tests.bench.overlap", "--rounds", str(options.rounds), "--worker", scratch]
        arguments += ["--bandwidth", options.bandwidth] if options.bandwidth else []
        sys.exit(launch(RANKS, arguments, {}))


if __name__ == "__main__":
    main()
