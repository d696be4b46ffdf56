"""What stages are weighed by, against what the readers find in a dry run of the finished program."""

from __future__ import annotations

import pytest

from compiler.analysis.estimate import estimate
from compiler.driver import compile
from compiler.dsl import loads
from compiler.report.stages import stage_rows

PLAN = """
model "dsl_examples.models.llama:Llama" { layers = 4, dim = 1024, heads = 8, kv_heads = 4, vocab = 32_000, context = 1024 }
batch = 32
input tokens : int64[batch, 1024]
input labels : int64[batch, 1024]
cluster { device = h100, intra = "nvlink 450GB/s" }
mesh pp=3
pipeline over pp { schedule = %s, microbatches = 8 }
precision { compute = bf16 }
optimizer adamw { lr = 1e-3 }
"""


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_memory_and_time_of_stages(schedule: str) -> None:
    c = compile(loads(PLAN % schedule, "prediction.plan"))
    found = estimate(c)
    for row, memory, time in zip(stage_rows(c), found.memory, found.time.stages, strict=True):
        assert row.state + row.activations + row.working == pytest.approx(memory.peak.bytes, rel=0.1)
        assert row.seconds * c.program.microbatches == pytest.approx(time.compute, rel=0.15)
