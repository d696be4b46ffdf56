"""`tensor { style = auto }`: the compiler finds the cuts that an expert would choose, and they are exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.analysis.verify import TOLERANCE, verify
from compiler.capture import capture
from compiler.diagnostics import Diagnostic, PlanError
from compiler.driver import compile
from compiler.dsl import loads
from compiler.dsl.plan import Plan
from compiler.passes.base import run_passes
from compiler.passes.pipeline import lowering
from compiler.requests import capture_request, layout_request
from compiler.tensor.found import as_patterns, found_styles
from compiler.tensor.topology import across_nodes
from tests.zoo import ZooModel, get, plan_text, select


def plan(name: str, mesh: str, sequence: bool = False, batch: int = 4, parts: int = 1, more: str = "") -> Plan:
    options = f"style = auto\n sequence = {'on' if sequence else 'off'}\n {more}"
    text = plan_text(get(name), batch=batch, mesh=mesh, microbatches=parts, extra=f"tensor over tp {{ {options} }}")
    return loads(text, f"{name}.plan")


def of_shape(model: str, inputs: str, mesh: str, tensor: str = "style = auto", more: str = "") -> Plan:
    """A plan of a large model that is only looked at."""
    data = "data over dp\n" if "dp=" in mesh else ""
    return loads(f"model {model}\n{inputs}\nmesh {mesh}\n{data}tensor over tp {{ {tensor} }}\n{more}\n", "large.plan")


def chosen(asked: Plan) -> tuple[dict[str, list[str]], list[Diagnostic]]:
    """The styles by patterns, and warnings; nothing after layouts is compiled."""
    captured = capture(capture_request(asked))
    graph = run_passes(captured.graph, lowering(asked))
    warnings: list[Diagnostic] = []
    request = layout_request(asked, graph, captured, warnings)
    for value in graph.inputs:
        value.layout = request.inputs.get(value.name)
    return found_styles(graph, graph, request.mesh.parts("tp"), ()).patterns, warnings


# -- what is found ------------------------------------------------------------------------------------------------

LLAMA = (
    '"dsl_examples.models.llama:Llama" { layers = 2, dim = 4096, heads = 32, kv_heads = 8, hidden = 14336, '
    "vocab = 128_256, context = 8192 }"
)
TEXT = "input tokens : int64[32, 4096]\ninput labels : int64[32, 4096]"
HF_TEXT = "input input_ids : int64[8, 1024]\ninput labels : int64[8, 1024]"
MEGATRON = {
    "column": ["layers.*.attn.w[qkv]", "layers.*.mlp.w[13]"],
    "row": ["layers.*.attn.wo", "layers.*.mlp.w2"],
    "vocab": ["embed", "head"],
}


def hugging_face(config: str, options: str) -> str:
    common = 'attn_implementation = "sdpa", use_cache = off'
    return f'"transformers:AutoModelForCausalLM.from_config" {{ config = "{config}", {common}, {options} }}'


@pytest.mark.parametrize("sequence", ["on", "off"])
@pytest.mark.parametrize("mesh", ["dp=4 tp=8", "tp=2", "dp=2 tp=16"])
def test_llama(mesh: str, sequence: str) -> None:
    """Also with more ranks than key/value heads."""
    assert chosen(of_shape(LLAMA, TEXT, mesh, f"style = auto\n sequence = {sequence}"))[0] == MEGATRON


def test_a_byte_level_llama() -> None:
    assert chosen(plan("llama-tiny", "tp=2"))[0] == MEGATRON
    assert chosen(plan("llama-small", "tp=4", sequence=True))[0] == MEGATRON


@pytest.mark.parametrize("sequence", ["on", "off"])
def test_gpt2_of_hugging_face(sequence: str) -> None:
    """Fused queries, keys and values, a transposed layer, tied tables; and the fused weight is cut inside each third."""
    asked = of_shape(
        hugging_face("GPT2Config", "bos_token_id = 0, eos_token_id = 0, n_layer = 2"), HF_TEXT, "dp=2 tp=4",
        f"style = auto\n sequence = {sequence}",
    )  # fmt: skip
    assert chosen(asked)[0] == {
        "column": ["transformer.h.*.attn.c_attn", "transformer.h.*.mlp.c_fc"],
        "row": ["transformer.h.*.attn.c_proj", "transformer.h.*.mlp.c_proj"],
        "vocab": ["transformer.wte", "transformer.wpe"],
    }
    compilation = compile(plan("hf-gpt2", "tp=2"))
    cuts = {parameter.name: parameter.cuts for parameter in compilation.program.parameters}
    assert cuts["transformer.h.0.attn.c_attn.weight"] == "1:tp:3:16:1"
    assert cuts["transformer.h.0.attn.c_attn.bias"] == "0:tp:3:16:1"
    assert cuts["transformer.h.0.attn.c_proj.bias"] == "" == cuts["transformer.h.0.ln_1.weight"]


def test_gpt_with_tied_and_with_own_head() -> None:
    for name, tables in (("gpt-tied-tiny", ["tokens", "positions"]), ("gpt-tiny", ["tokens", "positions", "head"])):
        found, _ = chosen(plan(name, "tp=2"))
        assert found["column"] == ["blocks.*.attn.query", "blocks.*.attn.key", "blocks.*.attn.value", "blocks.*.mlp.0"]
        assert found["row"] == ["blocks.*.attn.out", "blocks.*.mlp.2"]
        assert found["vocab"] == tables


def test_qwen3() -> None:
    options = (
        "vocab_size = 151936, hidden_size = 4096, intermediate_size = 12288, num_hidden_layers = 2, "
        "num_attention_heads = 32, num_key_value_heads = 8, head_dim = 128, max_position_embeddings = 4096"
    )
    found, _ = chosen(of_shape(hugging_face("Qwen3Config", options), HF_TEXT, "tp=4"))
    layers, projections = "model.layers.*", ("q_proj", "k_proj", "v_proj")
    column = [f"{layers}.self_attn.{name}" for name in projections]
    assert found["column"] == [*column, f"{layers}.mlp.gate_proj", f"{layers}.mlp.up_proj"]
    assert found["row"] == [f"{layers}.self_attn.o_proj", f"{layers}.mlp.down_proj"]
    assert found["vocab"] == ["model.embed_tokens", "lm_head"]


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_encoder_decoder(sequence: bool) -> None:
    found, _ = chosen(plan("encdec-small", "tp=2", sequence=sequence))
    assert {"encoder.*.attn.out", "decoder.*.attn.out", "decoder.*.cross.out"} <= set(found["row"])
    assert {"decoder.*.cross.key", "decoder.*.cross.value", "decoder.*.cross.query"} <= set(found["column"])
    assert found["vocab"] == ["source_embed", "target_embed", "head"]


def test_vision_transformer() -> None:
    model = '"dsl_examples.models.vit:ViT" { layers = 2, dim = 768, heads = 12, image = 224, patch = 16, classes = 1000 }'
    found, _ = chosen(of_shape(model, "input images : float32[32, 3, 224, 224]\ninput labels : int64[32]", "tp=4"))
    assert found["column"] == ["patches", "blocks.*.attn.qkv", "blocks.*.mlp.0"]
    assert found["row"] == ["blocks.*.attn.out", "blocks.*.mlp.2"]


def test_convolutions_by_channels() -> None:
    """No convolution is left whole, and between two of them channels stay where they are."""
    found, _ = chosen(plan("resnet-small", "tp=2"))
    assert "whole" not in found and "stages.*.*.conv2" in found["column"] and found["row"]


UNSEEN = """
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    '''Attention and MLP side by side, from one projection; a low-rank gate; scales for each channel.'''

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.enter = nn.Linear(dim, 3 * dim)
        self.wide = nn.Parameter(torch.randn(dim, 4 * dim) / 16)
        self.back = nn.Linear(4 * dim, dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.gate = nn.Linear(dim, 1)
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        b, s, d = x.shape
        y = self.norm(x)
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.enter(y).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, d)
        h = torch.einsum("bsd,dh->bsh", y, self.wide).tanh() ** 2
        return x + self.scale * (self.out(a) + self.back(h)) * self.gate(y).sigmoid()


class Odd(nn.Module):
    def __init__(self, dim=64, heads=4, layers=3, vocab=50):
        super().__init__()
        self.table = nn.Embedding(vocab, dim)
        self.first, self.blocks = Block(dim, heads), nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens, labels):
        x = self.first(self.table(tokens))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
"""


def unseen(folder: Path, mesh: str, tensor: str = "style = auto") -> Plan:
    (folder / "odd.py").write_text(UNSEEN)
    inputs = "input tokens : int64[4, 8]\ninput labels : int64[4, 8]"
    text = of_shape('"odd.py:Odd"', inputs, mesh, tensor, "optimizer adamw { lr = 1e-3 }").text
    return loads(text, str(folder / "odd.plan"))


def test_a_model_never_seen(tmp_path: Path) -> None:
    found, _ = chosen(unseen(tmp_path, "tp=2"))
    assert set(found["column"]) >= {"first.enter", "first.wide", "blocks.*.enter", "blocks.*.wide"}
    assert set(found["row"]) >= {"first.back", "first.out", "blocks.*.back", "blocks.*.out"}
    assert "table" in found["vocab"]
    verdict = verify(unseen(tmp_path, "tp=2"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


# -- what is found is exact ---------------------------------------------------------------------------------------

EVERY = [entry for entry in select(size="tiny", branch=False)]
EVERYDAY = {"llama-tiny-tp2-sequence", "llama-odd-tiny-tp2", "hf-gpt2-tp3", "encdec-tiny-tp2-sequence", "resnet-tiny-tp2",
            "c15_gqa_small-tp4", "c16_fused_qkv-tp2-sequence", "mlp-tiny-tp2", "vit-tiny-tp4", "lora-tiny-tp2"}  # fmt: skip


def sweep() -> list:
    cases = []
    for entry in EVERY:
        for ranks in (2, 3, 4):
            for sequence in (False, True):
                name = f"{entry.name}-tp{ranks}" + ("-sequence" if sequence else "")
                marks = () if name in EVERYDAY else (pytest.mark.full,)
                cases.append(pytest.param(entry, ranks, sequence, marks=marks, id=name))
    return cases


@pytest.mark.parametrize(("entry", "ranks", "sequence"), sweep())
def test_equal_to_one_device(entry: ZooModel, ranks: int, sequence: bool) -> None:
    try:
        verdict = verify(plan(entry.name, f"tp={ranks}", sequence), steps=2)
    except PlanError:
        if entry.name == "c46_vmap_mask":  # which may be refused
            return
        raise
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


@pytest.mark.parametrize(
    "name", ["llama-tiny", pytest.param("hf-gpt2-dropout", marks=pytest.mark.full), pytest.param("encdec-tiny", marks=pytest.mark.full)]
)  # fmt: skip
def test_with_data_parallelism_and_micro_batches(name: str) -> None:
    verdict = verify(plan(name, "dp=2 tp=2", sequence=True, batch=7, parts=2), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


# -- what the plan names, and what cannot be ----------------------------------------------------------------------

INCONSISTENT = {
    "queries alone": 'column "layers.*.attn.wq"',
    "keys whole": 'column "layers.*.attn.w[qv]"\n row "layers.*.attn.wo"',
    "rows alone": 'row "layers.*.mlp.w2", "layers.*.attn.wo"',
    "columns alone": 'column "layers.*.attn.w[qkvo]", "layers.*.mlp.w[123]", "embed"',
    "rows of what columns should be": 'row "layers.*.attn.w[qkv]", "layers.*.mlp.w[13]"\n column "layers.*.mlp.w2"',
    "head in rows": 'row "head"\n vocab "embed"',
}


@pytest.mark.parametrize("sequence", ["off", pytest.param("on", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", INCONSISTENT)
def test_any_choice_is_exact(name: str, sequence: str) -> None:
    extra = f"tensor over tp {{ {INCONSISTENT[name]}\n style = manual\n sequence = {sequence} }}"
    verdict = verify(loads(plan_text(get("llama-tiny"), batch=4, mesh="tp=2", extra=extra), "x.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


def test_what_is_named_stays_as_named() -> None:
    """Rows where columns would be cheaper, and layers left whole; the rest is found, and the table says which."""
    named = 'row "layers.0.mlp.w[13]"\n replicate "layers.1.mlp.*"'
    asked = plan("llama-tiny", "tp=2", more=named)
    compilation = compile(asked)
    dims = {p.name: p.cuts.partition(":")[0] for p in compilation.program.parameters}
    assert dims["layers.0.mlp.w1.weight"] == dims["layers.0.mlp.w3.weight"] == "1"
    assert all(dims[f"layers.1.mlp.w{k}.weight"] == "" for k in (1, 2, 3))
    assert dims["layers.1.attn.wq.weight"] == "0" and dims["layers.1.attn.wo.weight"] == "1"
    rows = {item.request.strip(): item for item in compilation.asked}
    assert rows["style = auto"].outcome == "applied"
    assert rows["column"].detail == '"layers.*.attn.w[qkv]"' and rows["vocab"].detail == '"embed", "head"'
    verdict = verify(asked, steps=1)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


@pytest.mark.parametrize(
    ("tensor", "code", "instead"),
    [
        ('row "embed"', "E260", 'vocab "embed"'),
        ('column "norm"', "E260", 'they stay whole: replicate "norm"'),
        ('row "layers.*.attn_norm"', "E260", 'they stay whole: replicate "layers.0.attn_norm"'),
        ('vocab "hed"', "E205", "did you mean `head`?"),
    ],
)
def test_a_style_that_a_layer_cannot_have(tensor: str, code: str, instead: str) -> None:
    with pytest.raises(PlanError) as error:
        chosen(plan("llama-tiny", "tp=2", more=tensor))
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.code == code and diagnostic.help == (instead,)
    assert diagnostic.span is not None and diagnostic.span.column > 1


def test_a_style_that_some_layers_cannot_have() -> None:
    _, (warning,) = chosen(plan("llama-tiny", "tp=2", more='column "layers.*.attn*"'))
    assert warning.code == "W031" and "`layers.0.attn_norm`" in warning.message


# -- uneven heads, and the wires ----------------------------------------------------------------------------------


def test_heads_that_do_not_divide() -> None:
    """Three heads on two ranks are padded to four; on three ranks they are not."""
    styles = 'style = manual\n column "layers.*.attn.w[qkv]"\n row "layers.*.attn.wo"'
    for ranks, expected in ((2, ["W032"]), (3, [])):
        text = plan_text(get("llama-odd-tiny"), batch=4, mesh=f"tp={ranks}", extra=f"tensor over tp {{ {styles} }}")
        _, warnings = chosen(loads(text, "x.plan"))
        assert [item.code for item in warnings] == expected
        if warnings:
            assert warnings[0].message.startswith("3 parts of 8 do not divide among 2 ranks: 33 %")
            assert warnings[0].help == ("1 or 3 ranks divide 3; 2 ranks divide 2 or 4",)
            verdict = verify(loads(text, "x.plan"), steps=1)
            assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


CLUSTER = 'cluster { nodes = 2, devices = 4, intra = "nvlink 900GB/s", inter = "ib 400Gb/s" }'


@pytest.mark.parametrize(
    ("mesh", "advice"),
    [
        ("dp=2 tp=4", None),
        ("dp=4 tp=2", None),
        ("tp=2 dp=4", "neighbouring ranks come last: mesh dp=4 tp=2"),
        ("tp=8", "at most 4 ranks of it fit in a node; more ranks of `data` or `pipeline` bear slow links better"),
    ],
)
def test_tensor_parallelism_across_nodes(mesh: str, advice: str | None) -> None:
    extra = f"tensor over tp {{ style = auto }}\n{CLUSTER}"
    asked = loads(plan_text(get("llama-tiny"), batch=8, mesh=mesh, extra=extra), "x.plan")
    found = across_nodes(asked)
    assert [item.help for item in found] == ([(advice,)] if advice else [])
    if mesh == "tp=8":
        assert "50 GB/s each between nodes, 900 GB/s inside (18 times as fast)" in found[0].notes[0]
        (warning,) = [item for item in compile(asked).warnings if item.code == "W030"]
        assert "MB in a step" in warning.notes[1]


def test_patterns() -> None:
    names = ["a.0.x.w1", "a.1.x.w1", "a.0.x.w3", "a.1.x.w3", "a.0.y", "b.0", "b.2"]
    assert as_patterns(names, ["a.1.y", "b.1", "a.0.x.w2"]) == ["a.*.x.w[13]", "a.0.y", "b.[02]"]
    assert as_patterns(["h.0.m.0", "h.1.m.0"], ["h.0.m.2", "h.1.m.2"]) == ["h.*.m.0"]
