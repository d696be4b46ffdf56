"""Tensor, sequence and vocabulary parallelism: equal to one device, with Megatron's communication and no more."""

from __future__ import annotations

from collections import Counter

import pytest

from compiler.analysis.verify import TOLERANCE, verify
from compiler.diagnostics import PlanError
from compiler.driver import compile
from compiler.dsl import loads
from runtime.program import load
from runtime.simulate import simulate
from runtime.transport import RankFailure
from tests.zoo import get, plan_text

STYLES = {
    "llama-tiny": 'column "layers.*.attn.w[qkv]", "layers.*.mlp.w[13]"\n row "layers.*.attn.wo", "layers.*.mlp.w2"\n vocab "embed", "head"',
    "llama-odd-tiny": 'column "layers.*.attn.w[qkv]", "layers.*.mlp.w[13]"\n row "layers.*.attn.wo", "layers.*.mlp.w2"\n vocab "embed", "head"',
    "c14_vocab_odd": 'column "up"\n row "down"\n vocab "table", "head"',
    "c15_gqa_small": 'column "layers.*.[qkv]"\n row "layers.*.o"',
    "c16_fused_qkv": 'column "layers.*.fused"\n row "layers.*.o"',
    "c20_padding_idx": 'vocab "table", "negative"\n column "mix"',
    "c12_dropout": 'column "blocks.*.[qkv]", "blocks.*.up"\n row "blocks.*.o", "blocks.*.down"\n vocab "table", "head"',
    "c36_label_shift": 'column "layers.*.[qkv]"\n row "layers.*.o"\n vocab "table", "head"',
    "c01_tied_pp": 'column "blocks.*.[qkv]", "blocks.*.up"\n row "blocks.*.o", "blocks.*.down"\n vocab "table"',
    "hf-gpt2": 'column "transformer.h.*.mlp.c_fc"\n row "transformer.h.*.mlp.c_proj"\n vocab "transformer.wte"',
    "hf-llama": 'column "model.layers.*.[qkv]_proj", "model.layers.*.gate_proj", "model.layers.*.up_proj"\n'
    ' row "model.layers.*.o_proj", "model.layers.*.down_proj"\n vocab "model.embed_tokens", "lm_head"',
}  # fmt: skip
STYLES["hf-qwen3"] = STYLES["hf-llama"]

COSTLY = ("c01_tied_pp", "c36_label_shift", "c20_padding_idx", "hf-gpt2", "hf-qwen3")
"""Tested by default on fewer meshes."""


def meshes(name: str) -> list[tuple[int, bool]]:
    """The (ranks, sequence parallelism) that a model is tested on here."""
    return [(2, True), (8, False)] if name in COSTLY else [(2, False), (3, True), (8, True)]


CASES = [(name, ranks, sequence) for name in STYLES for ranks, sequence in meshes(name)]
"""The others are in tests/sweeps."""


def text(name: str, mesh: str, parts: int = 1, sequence: bool = False, batch: int = 4) -> str:
    extra = f"tensor over tp {{ {STYLES[name]}\n style = manual\n sequence = {'on' if sequence else 'off'} }}"
    return plan_text(get(name), batch=batch, mesh=mesh, microbatches=parts, extra=extra)


@pytest.mark.parametrize(("name", "ranks", "sequence"), CASES)
def test_equal_to_one_device(name: str, ranks: int, sequence: bool) -> None:
    verdict = verify(loads(text(name, f"tp={ranks}", sequence=sequence), "tensor.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


@pytest.mark.parametrize("name", ["llama-tiny", "c12_dropout", "c14_vocab_odd", "hf-llama"])
def test_with_data_parallelism_and_micro_batches(name: str) -> None:
    verdict = verify(loads(text(name, "dp=2 tp=2", parts=2, sequence=True, batch=7), "tensor.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_a_llama_block_communicates_as_megatron_does(sequence: bool) -> None:
    """Forward two all-reduces (or two pairs of all-gather and reduce-scatter), backward as many."""
    compilation = compile(loads(text("llama-tiny", "tp=2", sequence=sequence), "x.plan"))
    code = compilation.linked.kinds["layers"].code

    def collectives(nodes: list) -> Counter:  # type: ignore[type-arg]
        names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        return Counter(name for node in nodes for name in names if node.op in (f"planc.{name}", f"planc.start_{name}"))

    each = {"all_gather": 2, "reduce_scatter": 2} if sequence else {"all_reduce": 2}
    assert collectives(code.forward) == each
    assert collectives(code.backward) == each
    norms = [b for b in compilation.program.buckets if "tp" in b.axes]
    assert bool(norms) == sequence, "norm weights are reduced over tp just where they work on parts of the sequence"


def test_a_pattern_that_names_nothing() -> None:
    plan = text("llama-tiny", "tp=2").replace("attn.wo", "attn.w0")
    with pytest.raises(PlanError, match="E205"):
        compile(loads(plan, "x.plan"))


def test_an_index_outside_of_a_cut_table_is_refused(tmp_path) -> None:
    """As on one device; else no rank would have the row, and all would give zeros."""
    program = load(compile(loads(text("llama-tiny", "tp=2"), "tensor.plan")).write(tmp_path / "program"))
    batch = get("llama-tiny").batch(4)
    batch["tokens"][0, 0] = 10_000
    with pytest.raises(RankFailure, match="index out of range: the table has 32 rows, the indices reach 10000"):
        simulate(program, lambda session: session.step(batch))
