"""The loss scale: the rule of torch.amp.GradScaler, and what it looks at."""

from __future__ import annotations

import pytest
import torch

from runtime.loss_scale import LossScale, LossScaling, overflow


def test_the_rule_is_torchs():
    """Halved after a step that was left out, doubled after some steps in a row without."""
    scaling = LossScaling(initial=1024.0, interval=3)
    scale = LossScale(scaling)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    found = [0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1]
    for bad in found:
        assert scale.value == scaler.get_scale()
        scaler.scale(parameter.sum())
        parameter.grad = torch.full((1,), float("nan") if bad else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scale.update(bool(bad))
    assert scale.value == scaler.get_scale() == 512.0


def test_a_fixed_scale_stays():
    scale = LossScale(LossScaling(64.0, dynamic=False))
    for skipped in (True, False, True):
        scale.update(skipped)
    scale.load({"scale": 2.0, "clean": 7})
    assert scale.value == 64.0


def test_a_scale_goes_on_where_it_was():
    one, other = LossScale(LossScaling(interval=3)), LossScale(LossScaling(interval=3))
    for skipped in (True, False, False):
        one.update(skipped)
    other.load(one.state())
    for scale in (one, other):
        scale.update(False)
        assert scale.value == 65536.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_element_is_found(dtype, bad):
    gradients = [torch.zeros(5, dtype=dtype), torch.empty(0, dtype=dtype), torch.ones(1000, dtype=dtype)]
    assert overflow(gradients, torch.device("cpu")) == 0
    gradients[2][777] = bad
    assert overflow(gradients, torch.device("cpu")) == 1
    assert overflow([], torch.device("cpu")) == 0
