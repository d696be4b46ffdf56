"""Properties over random plans: whatever the mesh, the batch, the masks and the model, a plan computes the same."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from compiler.analysis.verify import TOLERANCE, verify
from compiler.diagnostics import PlanError
from compiler.dsl import loads
from tests.zoo import plan_text, select

MODELS = select(size="tiny", branch=False, batchnorm=False)
EQUAL = [entry for entry in MODELS if entry.expect == "equal"]


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    entry=st.sampled_from(EQUAL),
    ranks=st.integers(1, 6),
    parts=st.integers(1, 4),
    batch=st.integers(1, 20),
    clip=st.sampled_from(["", "clip grad_norm = 0.5", "clip grad_value = 0.01"]),
    optimizer=st.sampled_from(
        [
            "optimizer adamw { lr = 1e-3 }",
            "optimizer sgd { lr = 1e-2, momentum = 0.9, nesterov = on }",
            'optimizer adamw { lr = 1e-2, weight_decay = 0.5, no_decay "*.bias", schedule = cosine, warmup = 2, total = 5 }',
        ]
    ),
)
def test_zoo_under_random_plans(entry, ranks, parts, batch, clip, optimizer) -> None:  # type: ignore[no-untyped-def]
    text = plan_text(entry, batch=batch, mesh=f"dp={ranks}", microbatches=parts, extra=clip, optimizer=optimizer)
    try:
        verdict = verify(loads(text, "random.plan"), steps=2)
    except PlanError as error:
        assert batch % (ranks * parts), text
        assert [d.code for d in error.diagnostics] == ["E204"], text
        return
    assert verdict.worst.error <= TOLERANCE, f"{verdict.worst}\n{text}"


class Random(nn.Module):
    """A stack of operations drawn from a seed; the loss weighs samples by a mask."""

    def __init__(self, seed: int, width: int, depth: int):
        super().__init__()
        chooser = torch.Generator().manual_seed(seed)
        self.kinds = torch.randint(0, 6, (depth,), generator=chooser).tolist()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=k % 2 == 0) for k in self.kinds)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, weight):  # type: ignore[no-untyped-def]
        h = x
        for kind, layer in zip(self.kinds, self.layers):
            y = layer(h)
            if kind == 0:
                h = h + torch.tanh(y)
            elif kind == 1:
                h = self.norm(y) * h.sigmoid()
            elif kind == 2:
                h = torch.cat([y[:, ::2], y[:, 1::2]], 1).flip(-1)
            elif kind == 3:
                h = y.softmax(-1) - y.amax(-1, keepdim=True)
            elif kind == 4:
                h = torch.where(y > 0, y, 0.1 * h)
            else:
                h = (y.unsqueeze(1) * y.unsqueeze(2)).sum(1) / y.shape[1]
        per_sample = h.square().sum(-1)
        return (per_sample * weight).sum() / weight.sum().clamp(min=1.0) + 1e-3 * sum(p.square().sum() for p in self.parameters())


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 1000), depth=st.integers(1, 6), ranks=st.integers(1, 5), parts=st.integers(1, 3), batch=st.integers(1, 9))
def test_random_models(seed: int, depth: int, ranks: int, parts: int, batch: int) -> None:
    text = f"""
model "tests.test_properties:Random" {{ seed = {seed}, width = 6, depth = {depth} }}
batch = {batch}
input x : float32[batch, 6]
input weight : float32[batch]
mesh dp={ranks}
data over dp {{ microbatches = {parts} }}
optimizer sgd {{ lr = 1e-3 }}
"""
    verdict = verify(loads(text, "random.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, f"{verdict.worst}\n{text}"
