"""What was done about ZeRO, for the table of requests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from compiler.dsl.units import show_size
from compiler.report.rows import APPLIED, NOTHING, Asked, many
from runtime.program import Program

if TYPE_CHECKING:
    from compiler.driver import Compilation

CUT = {1: "optimizer state", 2: "optimizer state and gradients", 3: "optimizer state, gradients and parameters"}


def zero_rows(c: Compilation) -> Iterator[Asked]:
    """Of `zero { … }`."""
    zero, program = c.plan.zero, c.program
    if zero is None or all(c.plan.axis_size(axis) == 1 for axis in zero.axes):
        return
    cut = [bucket for bucket in program.buckets if bucket.shard]
    ways = max((math.prod(map(c.mesh.size, bucket.shard)) for bucket in cut), default=1)
    count = sum(len(bucket.parameters) for bucket in cut)
    name = f"zero over {', '.join(zero.axes)}"
    if not cut:
        enough = f" and has {zero.persist_below} elements or more" if zero.persist_below else ""
        yield Asked(name, NOTHING, f"no parameter is replicated over these ranks{enough}")
        return
    yield Asked(
        name,
        APPLIED,
        f"{CUT[zero.stage]} of {many(count, 'parameter')} in {many(len(cut), 'bucket')}, 1/{ways} on each rank",
    )
    if "hybrid" in zero.given:
        across = {axis for bucket in cut for axis in bucket.across}
        detail = f"shards over {', '.join(cut[0].shard)}, replicas over {', '.join(sorted(across)) or 'nothing'}"
        yield Asked(f"hybrid = {zero.hybrid}", APPLIED, detail)
    if "bucket" in zero.given:
        largest = max(bucket.numel * getattr(torch, bucket.dtype).itemsize for bucket in cut)
        yield Asked(f"bucket = {show_size(zero.bucket)}", APPLIED, f"{many(len(cut), 'bucket')}, the largest {show_size(largest)}")
    if "persist_below" in zero.given:
        whole = sum(len(bucket.parameters) for bucket in program.buckets if not bucket.shard)
        outcome = APPLIED if whole else NOTHING
        yield Asked(f"persist_below = {zero.persist_below}", outcome, f"{many(whole, 'parameter')} stay whole")
    gathers = on_a_rank(program, "gather")
    if "prefetch" in zero.given:
        if zero.stage == 3:
            done = Asked(f"prefetch = {zero.prefetch}", APPLIED, f"{gathers}, each {zero.prefetch} ahead of its use")
        else:
            done = Asked(f"prefetch = {zero.prefetch}", NOTHING, f"all {gathers} start with the step")
        yield done
    if "gather" in zero.given:
        outcome = APPLIED if zero.stage == 3 else NOTHING
        yield Asked(f"gather = {zero.gather}", outcome, f"{gathers} a step")
    if "accumulate" in zero.given:
        outcome = APPLIED if zero.stage >= 2 and program.microbatches > 1 else NOTHING
        yield Asked(f"accumulate = {zero.accumulate}", outcome, f"{on_a_rank(program, 'reduce', 'reduction')} a step")
    if "offload" in zero.given and zero.offload != "none":
        held = sum(bucket.offload != "none" for bucket in cut)
        yield Asked(f"offload = {zero.offload}", APPLIED, f"of {many(held, 'bucket')}, in the host's memory")


def on_a_rank(program: Program, op: str, thing: str = "") -> str:
    """How many instructions `op` a rank has, of each pipeline stage if they differ: "2 gathers", "2 / 3 gathers (stages
    0 / 1)"."""
    counts = [sum(i.op == op for i in stream) for stream in program.streams]
    if len(set(counts)) == 1:
        return many(counts[0], thing or op)
    stages = " / ".join(map(str, range(len(counts))))
    return f"{' / '.join(map(str, counts))} {thing or op}s (stages {stages})"
