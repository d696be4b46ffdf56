"""What the sweeps share: the models, and how a plan is checked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compiler.analysis.verify import verify
from compiler.diagnostics import PlanError
from compiler.dsl import loads
from tests.zoo import ZOO, ZooModel, get, plan_text

MODELS = tuple(entry.name for entry in ZOO if entry.size == "tiny" and "branch" not in entry.traits)
ATTENTIVE = (
    "gpt-tiny", "gpt-tied-tiny", "gpt-attention-dropout-tiny", "llama-tiny", "llama-odd-tiny", "encdec-tiny", "vit-tiny",
    "c09_encdec", "c33_doc_mask", "c36_label_shift", "c46_vmap_mask", "hf-llama", "hf-qwen3", "hf-gemma3", "hf-gpt2",
)  # fmt: skip
"""Those with attention over a sequence."""
FLAT = ("c11_batchnorm", "c14_vocab_odd", "c20_padding_idx", "c46_vmap_mask")
"""Models without a list of layers: pipelines of them need `segment "*"`."""
TIMEOUT = 600.0
"""Seconds in which all simulated ranks must come to an operation: sixteen of them share one thread."""


def strategy(statement: str, **options: object) -> str:
    """`statement { name = value, … }`."""
    return f"{statement} {{ {', '.join(f'{name} = {value}' for name, value in options.items())} }}"


def deep(name: str, layers: int) -> ZooModel:
    """The model with more layers, if it is built from a number of layers."""
    entry = get(name)
    counts = [option for option in ("layers", "num_hidden_layers", "n_layer") if option in entry.options]
    return replace(entry, options={**entry.options, **dict.fromkeys(counts, layers)})


def mixes_samples(name: str) -> bool:
    """Whether the model computes statistics of whole batches, which cannot be cut into micro-batches (E202)."""
    return "batchnorm" in get(name).traits


def check(entry: ZooModel, mesh: str, *statements: str, batch: int, parts: int = 1, refused: str | None = None) -> None:
    """The plan equals one device to 1e-10 in loss, metrics, gradients, parameters and buffers after two steps; or, where
    it cannot be, it is refused with the diagnostic of this code."""
    text = plan_text(entry, batch=batch, mesh=mesh, microbatches=parts, extra="\n".join(statements))
    plan = loads(text, "sweep.plan")
    if refused is not None:
        with pytest.raises(PlanError, match=refused):
            verify(plan, steps=2, timeout=TIMEOUT)
        return
    verdict = verify(plan, steps=2, timeout=TIMEOUT)
    assert verdict.ok, str(verdict.worst)
