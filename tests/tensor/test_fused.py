"""Projections that make several things of different sizes at once: exact, and cut as separate ones would be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import compiler
from compiler.analysis.verify import TOLERANCE, random_batch, verify
from compiler.dsl import loads
from runtime.checkpoint import step_path
from runtime.program import Program
from runtime.program import load as load_program
from runtime.simulate import simulate
from tests.tensor.models import block, llama

READINGS = ("split", "slices", "heads", "weights")
NAMED = """style = manual
    column "layers.*.attn.qkv", "layers.*.mlp.w[13]"
    row    "layers.*.attn.wo", "layers.*.mlp.w2"
    vocab  "embed", "head"
"""
PHI = """vocab_size = 32, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2, num_attention_heads = 8,
    max_position_embeddings = 32, pad_token_id = 0, attn_implementation = "sdpa", use_cache = off"""


def plan(
    model: str, mesh: str, sequence: bool = False, styles: str = "style = auto", extra: str = "", tokens: str = "tokens"
) -> str:
    return f"""
model {model}
batch = 4
seq = 8
input {tokens} : int64[batch, seq]
input labels : int64[batch, seq]
mesh {mesh}
{"data over dp" if "dp" in mesh else ""}
tensor over tp {{
    {styles}
    sequence = {"on" if sequence else "off"}
}}
{extra}
optimizer adamw {{ lr = 1e-3, weight_decay = 0.1 }}
clip grad_norm = 1.0
"""


def fused(reading: str = "split", kv_heads: int = 4, bias: bool = False, heads: int = 8) -> str:
    sizes = dict(layers=2, dim=4 * heads, heads=heads, kv_heads=kv_heads, vocab=32, context=16, hidden=64)
    options = ", ".join(f"{key} = {value}" for key, value in sizes.items())
    return f'"tests.tensor.fused:FusedLlama" {{ {options}, reading = "{reading}", bias = {"on" if bias else "off"} }}'


def phi(kv_heads: int = 4) -> str:
    factory = "transformers:AutoModelForCausalLM.from_config"
    return f'"{factory}" {{ config = "Phi3Config", num_key_value_heads = {kv_heads}, {PHI} }}'


def layouts(compilation: compiler.Compilation, module: str) -> list[str]:
    """Over the tensor axes, those of the weights of a module."""
    inputs = [value for value in compilation.assigned.main.inputs if value.name.startswith(module)]
    return [str(value.layout["tp"]) for value in inputs]


def exact(text: str) -> None:
    verdict = verify(loads(text, "fused.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


@pytest.mark.parametrize("styles", ["style = auto", NAMED], ids=["auto", "named"])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("reading", READINGS)
def test_a_block_communicates_as_with_separate_projections(reading: str, sequence: bool, styles: str) -> None:
    _, *separate = block(llama(2, 8, 4, sequence))
    compilation, *together = block(plan(fused(reading), "tp=2", sequence, styles))
    assert together == separate
    assert layouts(compilation, "layers.0.attn.qkv") == ["S(0, 2+1+1)"]


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("reading", READINGS)
def test_equal_to_one_device(reading: str, sequence: bool) -> None:
    """With a bias, which is in pieces too, on four ranks."""
    exact(plan(fused(reading, bias=True), "tp=4", sequence, NAMED))


@pytest.mark.parametrize(
    ("mesh", "extra"),
    [
        ("dp=2 tp=2", "zero over dp { stage = 3 }"),
        ("pp=2 tp=2", "pipeline over pp { microbatches = 2 }"),
        ("cp=2 tp=2", "context over cp { attention = ring }"),
        ("cp=2 tp=2", "context over cp { attention = ulysses }"),
    ],
)
def test_equal_with_other_strategies(mesh: str, extra: str) -> None:
    exact(plan(fused(kv_heads=2 if "ring" in extra else 4), mesh, True, extra=extra))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp"), [(8, 2, 4), (8, 1, 2), (8, 1, 4), (6, 3, 2), (6, 2, 4), (12, 3, 8)], ids=str
)
@pytest.mark.parametrize("styles", ["style = auto", NAMED], ids=["auto", "named"])
def test_equal_where_heads_do_not_divide(heads: int, kv_heads: int, tp: int, styles: str) -> None:
    exact(plan(fused(heads=heads, kv_heads=kv_heads), f"tp={tp}", True, styles))


def test_keys_that_ranks_share_are_gathered_alone() -> None:
    """One key/value head for two ranks: of the projection its part is gathered, that of the queries is not."""
    compilation, forward, backward = block(plan(fused(kv_heads=1), "tp=2", styles=NAMED))
    gathers = [node for node in compilation.assigned.main.nodes if node.op == "planc.all_gather"]
    assert {node.outputs[0].shape[-1] for node in gathers if node.origin.module.startswith("layers")} == {4}
    assert forward["all_reduce"] == 2 and "reduce_scatter" in backward


@pytest.mark.parametrize(("kv_heads", "tp", "sequence"), [(4, 2, True), (2, 4, False)])
def test_phi3(kv_heads: int, tp: int, sequence: bool) -> None:
    pytest.importorskip("transformers")
    text = plan(phi(kv_heads), f"tp={tp}", sequence, tokens="input_ids")
    exact(text)
    if tp == 2:
        compilation = compiler.compile(loads(text, "phi.plan"))
        assert layouts(compilation, "model.layers.0.self_attn.qkv_proj") == ["S(0, 2+1+1)"]
        assert layouts(compilation, "model.layers.0.mlp.gate_up_proj") == ["S(0, outer=2)"]


@pytest.mark.parametrize(("groups", "tp"), [(2, 2), (1, 2), (2, 4)])
def test_a_state_space_block(groups: int, tp: int) -> None:
    """[z | x | B | C | dt]: each head has its part; B and C are gathered where all heads share them."""
    text = plan(f'"tests.tensor.fused:ScanModel" {{ groups = {groups} }}', f"tp={tp}")
    exact(text)
    if groups == tp:
        compilation, forward, _ = block(text)
        assert forward == {"all_reduce": 1}
        assert layouts(compilation, "layers.0.in_proj.weight") == ["S(0, 8+8+2+2+1)"]


def test_checkpoints_hold_the_logical_weight(tmp_path: Path) -> None:
    """Two steps each on two ranks, on one and on four are six steps on one."""

    def program_of(tp: int) -> Program:
        text = plan(fused(bias=True), f"tp={tp}", styles=NAMED)
        compilation = compiler.compile(loads(text, "fused.plan"), options=compiler.Options(widen=True))
        return load_program(compilation.write(tmp_path / f"tp{tp}"))

    def run(program: Program, first: int, last: int, restore: Path | None = None, save: Path | None = None):
        def body(session):
            if restore:
                session.restore(restore)
            losses = [session.step(random_batch(program, step)).loss for step in range(first, last)]
            if save:
                session.save(save)
            return losses, session.state_dict()

        return simulate(program, body)

    programs = {tp: program_of(tp) for tp in (1, 2, 4)}
    truth = run(programs[1], 0, 6)[0]
    path = None
    for turn, tp in enumerate((2, 1, 4)):
        save = step_path(tmp_path, 2 * turn + 2)
        results = run(programs[tp], 2 * turn, 2 * turn + 2, path, save)
        for losses, _ in results:
            assert losses == pytest.approx(truth[0][2 * turn : 2 * turn + 2], rel=1e-11)
        path = save
    for name, tensor in truth[1].items():
        torch.testing.assert_close(results[0][1][name], tensor, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
