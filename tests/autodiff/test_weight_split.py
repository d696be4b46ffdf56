"""Backwards in two parts give the gradients of whole ones, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compiler.analysis.verify import random_batch
from compiler.autodiff.partition import COSTLY
from compiler.driver import Compilation, Options, compile
from compiler.dsl import loads
from runtime.program import load
from runtime.session import Session
from runtime.simulate import simulate
from tests.autodiff.streams import split_backwards
from tests.test_tensor import STYLES
from tests.zoo import ZooModel, get, plan_text, select

# A parameter that several calls use (tied) gets its sums in another order.
MODELS = select(size="tiny", branch=False, tied=False)


def gradients(compilation: Compilation, folder: Path) -> list[dict[str, torch.Tensor]]:
    """The gradients that each rank has after a step."""
    program = load(compilation.write(folder))

    def run(session: Session) -> dict[str, torch.Tensor]:
        session.step(random_batch(program, 0))
        return {name: tensor.clone() for name, tensor in session.gradients().items()}

    return simulate(program, run)


def compiled(entry: ZooModel, mesh: str = "dp=2", parts: int = 3, extra: str = "") -> Compilation:
    parts = 1 if "batchnorm" in entry.traits else parts
    text = plan_text(entry, batch=2 * parts, mesh=mesh, microbatches=parts, extra=extra, optimizer="")
    return compile(loads(text, "split.plan"), options=Options(widen=True))


@pytest.mark.parametrize(
    "patience", [pytest.param(0, marks=pytest.mark.full), pytest.param(7, marks=pytest.mark.full), 1000]
)
@pytest.mark.parametrize("entry", MODELS, ids=lambda e: e.name)
def test_the_same_gradients(entry: ZooModel, patience: int, build_dir: Path) -> None:
    if entry.name == "c46_vmap_mask":
        pytest.skip("refused: it maps over samples")
    whole = compiled(entry)
    expected = gradients(whole, build_dir / "whole")
    found = gradients(split_backwards(whole, patience), build_dir / "split")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("name", ["gpt-tied-tiny", "c01_tied_pp", "hf-gpt2", "mlp-tiny"])
def test_tied_parameters(name: str, build_dir: Path) -> None:
    whole = compiled(get(name))
    expected = gradients(whole, build_dir / "whole")
    found = gradients(split_backwards(whole, 5), build_dir / "split")
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.allclose(ours[name], theirs[name], rtol=1e-12, atol=1e-13) for name in theirs)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny", "encdec-tiny"])
def test_with_recomputation_and_tensor_parallelism(name: str, policy: str, build_dir: Path) -> None:
    extra = f'recompute "**" = {policy}'
    if name in STYLES:
        extra += f"\ntensor over tp {{ {STYLES[name]}\n style = manual\n sequence = on }}"
    whole = compiled(get(name), "dp=1 tp=2" if name in STYLES else "dp=1", extra=extra)
    expected = gradients(whole, build_dir / "whole")
    found = gradients(split_backwards(whole, 5), build_dir / "split")
    for ours, theirs in zip(found, expected, strict=True):
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_what_each_part_does() -> None:
    """A Llama block: the seven weight products are late, the sums for the norms' weights are not; what is kept are the
    factors of the products and nothing else."""
    split = compiled(get("llama-tiny"), parts=1).linked.kinds["layers"].split
    late = [node for node in split.weight.nodes if node.op.startswith((*COSTLY, "planc.product_into"))]
    assert [node.op for node in late] == ["planc.product_into"] * 7 and len(split.weight.gradients) == 7
    assert [node.args[0] for node in late] == [split.weight.gradients.index(node.outputs[0]) for node in late]
    assert not [node for node in split.input.nodes if node.op == "planc.product_into"]
    assert len(split.input.gradients) == 3  # of x and of two norm weights
    factors = {value for node in split.weight.nodes for value in node.inputs}
    assert split.weight.needed == [] and set(split.kept) <= factors
    assert len(split.kept) == 4 + 7  # inputs: of q, k and v; of o; of gate and up; of down


def test_a_program_without_split_instructions_has_no_parts(build_dir: Path) -> None:
    whole = compiled(get("llama-tiny"))
    assert "backward_input" not in (whole.write(build_dir / "a") / "segments" / "layers.py").read_text()
    text = (split_backwards(whole, 0).write(build_dir / "b") / "segments" / "layers.py").read_text()
    assert "def backward_input(ctx, given)" in text and "def backward_weight(ctx, given)" in text
