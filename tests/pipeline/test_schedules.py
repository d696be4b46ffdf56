"""Every schedule computes what one device does, with skips over stages and a weight that both ends use."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.analysis.verify import verify
from compiler.dsl import load
from compiler.schedule.named import make_schedule

MODEL = '''\
import torch.nn.functional as F
from torch import nn


class Skips(nn.Module):
    """Each layer of the second half adds the input of its mirror image in the first."""

    def __init__(self, layers=8):
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x, y):
        x, kept = self.embed(x), []
        for k, layer in enumerate(self.layers):
            kept.append(x)
            x = layer(x).tanh()
            if 2 * k >= len(self.layers):
                x = x + kept[-k - 1 + len(self.layers)]
        return {"loss": F.mse_loss(self.head(x), y)}
'''


@pytest.mark.parametrize(
    "schedule, ranks, microbatches, more",
    [
        ("gpipe", 3, 2, ""),
        ("1f1b", 4, 4, "data over dp; zero over dp { stage = 3, bucket = 64B }"),
        ("interleaved", 2, 4, ""),
        ("interleaved", 2, 3, "clip grad_norm = 0.01"),
        ("zb_h1", 4, 6, "clip grad_norm = 0.01"),
        ("zb_v", 2, 4, "data over dp; zero over dp { stage = 2, bucket = 64B }"),
        ("dualpipe_v", 2, 4, "clip grad_norm = 0.01"),
        ("auto", 3, 4, ""),
        ('"own.csv"', 2, 2, ""),
    ],
)
def test_equal_to_one_device(tmp_path: Path, schedule: str, ranks: int, microbatches: int, more: str) -> None:
    (tmp_path / "skips.py").write_text(MODEL)
    (tmp_path / "own.csv").write_text("0F1,0F0,2F1,2I1,0I1,2F0,2B0,0B0,2W1,0W1\n1F1,1F0,1B1,1B0\n")
    ways = 2 if "over dp" in more else 1
    (tmp_path / "skips.plan").write_text(
        f"""\
model "skips.py:Skips"
batch = {2 * ways * microbatches}
input x : float32[batch, 4]
input y : float32[batch, 4]
mesh pp={ranks} dp={ways}
pipeline over pp {{ schedule = {schedule}, microbatches = {microbatches} }}
optimizer adamw {{ lr = 0.1 }}
{more.replace("; ", chr(10))}
"""
    )
    verdict = verify(load(tmp_path / "skips.plan"), 2)
    assert verdict.ok, verdict.deviations[:3]


def test_a_file_with_the_same_order_is_the_same_program(tmp_path: Path) -> None:
    from compiler.driver import compile

    (tmp_path / "skips.py").write_text(MODEL)
    (tmp_path / "own.csv").write_text(str(make_schedule("zb_h1", 2, 3)))
    plan = """\
model "skips.py:Skips"
input x : float32[6, 4]
input y : float32[6, 4]
mesh pp=2
pipeline over pp { schedule = zb_h1, microbatches = 3 }
"""
    (tmp_path / "named.plan").write_text(plan)
    (tmp_path / "own.plan").write_text(plan.replace("zb_h1", '"own.csv"'))
    named, own = (compile(tmp_path / f"{name}.plan").program for name in ("named", "own"))
    assert named.streams == own.streams
