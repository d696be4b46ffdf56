"""What good plans mean."""

import pytest
from tests.dsl.plan_cases import complete

from compiler.dsl import loads
from compiler.dsl.plan import Pattern

LLAMA = """
model "dsl_examples.models.llama:Llama" { layers = 8, dim = 64 * heads, bias = off }
heads = 8
batch = 32
seq = 2048
input tokens : int64[batch, seq]
input table : bf16[16, 8] shared
input images : float32[3, batch * 2, 8] batch dim 1
cluster { nodes = 2, devices = 4, device = h100, intra = "nvlink 900GB/s", inter = "ib 400Gb/s 5us" }
mesh pp=2 dp=2 cp=1 tp=2
data over dp
zero over dp { stage = 3, bucket = 2 * 25MiB, persist_below = 10_000, hybrid = none }
tensor over tp {
    column "layers.*.attn.w[qkv]", "layers.*.mlp.w[13]"
    row "layers.*.attn.wo",
        "layers.*.mlp.w2"
    vocab "embed"
    sequence = true
}
context over cp { attention = ulysses, order = contiguous }
pipeline over pp { schedule = interleaved, microbatches = 8
  split before "layers.2", "layers.4", "layers.6" }
recompute "layers.*" = selective
recompute "layers.0", "layers.1" = fit(70GB)
precision { compute = fp16, reduce = fp32 }
optimizer adamw {
    lr = 3e-4, betas = (0.9, 0.95)
    schedule = cosine, warmup = 100, total = 10_000, min_lr = 3e-5
    no_decay "*.bias", "*norm*"
}
clip grad_norm = 1.0 grad_value = 0.5
opaque "a"
opaque "b", "c"
train { steps = 100, log = "log.jsonl" }
"""


@pytest.fixture(scope="module")
def plan():
    return loads(LLAMA, "llama.plan")


def test_model_and_inputs(plan):
    assert plan.model.factory == "dsl_examples.models.llama:Llama"
    assert plan.model.options == {"layers": 8, "dim": 512, "bias": False}
    tokens, table, images = plan.inputs
    assert (tokens.dtype, tokens.shape, tokens.dim_names) == (
        "int64", (32, 2048), ("batch", "seq")
    )  # fmt: skip
    assert (table.dtype, table.batch_dim) == ("bfloat16", None)
    assert (images.shape, images.dim_names, images.batch_dim) == ((3, 64, 8), (None,) * 3, 1)
    assert plan.names == {"heads": 8, "batch": 32, "seq": 2048}


def test_mesh_and_cluster(plan):
    assert [(a.name, a.size) for a in plan.mesh] == [("pp", 2), ("dp", 2), ("cp", 1), ("tp", 2)]
    assert plan.ranks == 8 and plan.axis_size("tp") == 2
    assert plan.cluster.intra.bandwidth == 900e9
    assert plan.cluster.inter.bandwidth == 50e9 and plan.cluster.inter.latency == 5e-6
    assert plan.cluster.hardware.memory == 80_000_000_000
    assert plan.cluster.hardware.flops["bfloat16"] == 989e12


def test_strategies(plan):
    assert list(plan.strategies) == ["data", "zero", "tensor", "context", "pipeline"]
    assert plan.zero.bucket == 2 * 25 * 2**20 and plan.zero.hybrid is None
    assert plan.zero.axes == ("dp",) and plan.zero.prefetch == 1
    assert set(plan.zero.given) == {"stage", "bucket", "persist_below", "hybrid"}
    assert plan.tensor.row == (Pattern("layers.*.attn.wo"), Pattern("layers.*.mlp.w2"))
    assert plan.tensor.sequence is True
    assert plan.pipeline.virtual == 2 and len(plan.pipeline.split_before) == 3
    assert plan.microbatches == 8
    span = plan.zero.given["stage"]
    assert LLAMA.split("\n")[span.line - 1][span.column - 1 :].startswith("stage = 3")


def test_training(plan):
    assert plan.optimizer.options == {
        "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 1e-2
    }  # fmt: skip
    assert plan.optimizer.total == 10_000
    assert [p.text for p in plan.optimizer.no_decay] == ["*.bias", "*norm*"]
    assert (plan.clip.grad_norm, plan.clip.grad_value) == (1.0, 0.5)
    assert [(r.policy, r.limit) for r in plan.recompute] == [
        ("selective", None), ("fit", 70_000_000_000)
    ]  # fmt: skip
    assert plan.precision.compute == "float16" and plan.precision.loss_scale == "dynamic"
    assert [p.text for p in plan.opaque] == ["a", "b", "c"]
    assert plan.train.directory == "runs/llama" and plan.train.epochs is None


def test_the_smallest_plan_has_all_defaults():
    plan = loads('model "m:M"\ninput x : float32[4]\n')
    assert plan.ranks == 1 and plan.mesh == () and plan.microbatches == 1
    assert plan.train.epochs == 1 and plan.mode == "train" and plan.optimizer is None
    assert plan.warnings == ()


def test_defaults_are_torchs():
    torch = pytest.importorskip("torch")
    parameter = [torch.nn.Parameter(torch.zeros(1))]
    for name, cls in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)):
        ours = loads(complete(f"optimizer {name}")).optimizer.options
        theirs = cls(parameter).defaults
        assert {k: theirs[k] for k in ours} == ours


def test_dtypes_are_torchs():
    torch = pytest.importorskip("torch")
    from compiler.dsl.dtypes import INPUT_DTYPE

    for dtype in INPUT_DTYPE.meaning.values():
        assert isinstance(getattr(torch, dtype), torch.dtype)


@pytest.mark.parametrize(
    "text, value",
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("-2 ** 2", -4),
        ("2 ** -1", 0.5),
        ("2 ** 3 ** 2", 512),
        ("7 // 2", 3),
        ("7 / 2", 3.5),
        ("7 % 4", 3),
        ("1e-3", 1e-3),
        ("10_000", 10_000),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("-(-3)", 3),
        ("25MB", 25_000_000),
        ("1GB // 1MB", 1000),
        ("1GB / 4", 250_000_000),
        ("3 * 1KiB", 3072),
        ("400Gb/s", 50e9),
        ("989TFLOPS", 989e12),
        ("5us", 5e-6),
    ],
)
def test_arithmetic(text, value):
    result = loads(complete(f"_a = {text}")).names["_a"]
    assert result == pytest.approx(value) and type(result) is type(value)


def test_model_options_of_every_type():
    text = 'model "m:M" { a = 1, b = 0.5, c = on, d = none, e = "x", f = [1, [2]], g = (1, on), h = () }'
    assert loads(complete(text)).model.options == {
        "a": 1, "b": 0.5, "c": True, "d": None, "e": "x", "f": [1, [2]], "g": (1, True), "h": ()
    }  # fmt: skip


@pytest.mark.parametrize(
    "factory",
    ["m:M", "a.b.c:D.e", "models/my-model.py:Net", "../x.py:f", "transformers:A.from_config"],
)
def test_factories(factory):
    assert loads(complete(f'model "{factory}"')).model.factory == factory


def test_a_name_may_be_used_above_its_definition_and_axes_are_names_too():
    plan = loads(complete("input y : int64[batch * dp]\nbatch = half * 2\nhalf = 4\nmesh dp=3"))
    assert plan.inputs[0].shape == (24,)
    assert plan.names == {"batch": 8, "half": 4}


def test_a_long_chain_of_names_needs_no_recursion():
    chain = "".join(f"a{i} = a{i + 1} + 1\n" for i in range(3000)) + "a3000 = 0\n"
    assert loads(complete(chain + "input y : int64[a0]")).inputs[0].shape == (3000,)


@pytest.mark.parametrize(
    "text, code",
    [
        ("unused = 3", "W001"),
        ("mesh dp=2", "W002"),
        ("mode = forward\noptimizer sgd", "W003"),
        ('mode = forward\nrecompute "layers.*" = full', "W003"),
        ("optimizer adamw { min_lr = 1e-5 }", "W003"),
    ],
)
def test_warning(text, code):
    warnings = loads(complete(text, ("model", "input"))).warnings
    assert [w.code for w in warnings] == [code] and warnings[0].span.line >= 1


def test_tabs_crlf_and_a_byte_order_mark():
    text = complete("data over dp {\n\ttail = drop\n}\n")
    same = loads("\ufeff" + text.replace("\n", "\r\n"))
    assert same == loads(text)
    assert same.data.given["tail"].column == 2


def test_a_brace_may_stand_on_its_own_line():
    assert loads(complete("data over dp\n\n# why\n{\n tail = drop }")).data.tail == "drop"


def test_equality_ignores_places():
    assert loads(complete("data over dp")) == loads("\n\n" + complete("data   over dp { }"))
    assert loads(complete("data over dp")) != loads(complete("data over dp { tail = drop }"))
