"""Losses over a vocabulary that is cut: the logits are never gathered, however the loss is written."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiler.analysis.verify import TOLERANCE, verify
from compiler.driver import compile
from compiler.dsl import loads
from runtime import cross_entropy
from runtime.log_sum_exp import log_sum_exp
from tests.tensor.models import COLLECTIVES
from tests.tensor.toy import LOSSES


def plan(loss: str, tp: int, vocab: int, mesh: str = "", data: str = "") -> str:
    return f"""
model "tests.tensor.toy:Head" {{ loss = "{loss}", vocab = {vocab}, bias = on }}
batch = 4
input tokens : int64[batch, 6]
input labels : int64[batch, 6]
mesh {mesh} tp={tp}
{data}
tensor over tp {{
    style = manual
    vocab "embed", "head"
}}
optimizer adamw {{ lr = 1e-3 }}
"""


@pytest.mark.parametrize("vocab", [24, 25], ids=["even", "padded"])
@pytest.mark.parametrize("loss", LOSSES)
def test_equal_to_one_device(loss: str, vocab: int) -> None:
    verdict = verify(loads(plan(loss, 4, vocab), "loss.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


@pytest.mark.parametrize("loss", LOSSES)
def test_with_data_parallelism_and_micro_batches(loss: str) -> None:
    text = plan(loss, 2, 25, "dp=2", "data over dp { microbatches = 2 }")
    verdict = verify(loads(text, "loss.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_logits_are_communicated(loss: str) -> None:
    """What is exchanged is one number for each of 24 tokens, or one of its activations (of width 16)."""
    compilation = compile(loads(plan(loss, 4, 128), "loss.plan"))
    codes = [kind.recorded for kind in compilation.linked.kinds.values()]
    nodes = [node for code in codes for node in (*code.forward, *code.backward)]
    assert any(node.op in ("planc.log_sum_exp", "planc.cross_entropy") for node in nodes)
    sizes = [math.prod(node.args[0].shape) for node in nodes if node.op in COLLECTIVES]
    assert max(sizes) <= 24 * 16, "a rank's logits are twice that"


class Peak(TorchDispatchMode):
    """The most elements that large tensors made inside had at one time."""

    def __init__(self, smallest: int):
        super().__init__()
        self.smallest, self.peak = smallest, 0
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.smallest:
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                if key not in self.alive and key not in self.given:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result

    def of(self, function, *operands: torch.Tensor) -> float:  # type: ignore[no-untyped-def]
        """In tensors of the size of the first operand in float32."""
        self.given = {tensor.untyped_storage().data_ptr() for tensor in operands}
        with self:
            kept = function(*operands)
        del kept
        return self.peak / (operands[0].numel() * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_copies_of_the_logits_than_eager(dtype: torch.dtype) -> None:
    n, c = 64, 512
    logits, target = torch.randn(n, c).to(dtype), torch.randint(0, c, (n,))
    alone = (0, c, c, lambda tensor, op: tensor)

    def fused(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        each, lse = cross_entropy.forward(x, target, None, -100, 0.0, *alone)
        return each, cross_entropy.backward(torch.ones(n), x, target, None, lse, -100, 0.0, *alone)

    def eager(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        each = torch.nn.functional.cross_entropy(x, target, reduction="none")
        return each, torch.autograd.grad(each, x, torch.ones_like(each))[0]

    assert Peak(n * c).of(eager, logits) >= 1.0
    assert Peak(n * c).of(fused, logits) <= max(Peak(n * c).of(eager, logits), 1.5)
    assert Peak(n * c).of(lambda x: log_sum_exp(x, 1, c, lambda t, op: t), logits) <= 1.0


def test_lines_of_infinities() -> None:
    """As torch has it: nothing but -inf gives -inf, one +inf gives +inf."""
    x = torch.tensor([[-math.inf, -math.inf], [math.inf, 0.0], [1.0, -math.inf]])
    found = log_sum_exp(x, 1, 2, lambda tensor, op: tensor)
    assert torch.equal(found, x.logsumexp(1, keepdim=True))
