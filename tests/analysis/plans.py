"""The plans that the readers are tested on."""

from __future__ import annotations

from compiler.dsl import loads
from compiler.dsl.plan import Plan
from tests.zoo import get, plan_text

LLAMA = """tensor over tp {
    column "layers.*.attn.w[qkv]", "layers.*.mlp.w[13]"
    row    "layers.*.attn.wo", "layers.*.mlp.w2"
    vocab  "embed", "head"
    sequence = %s
}
"""

PLANS: dict[str, tuple[str, str, int, str]] = {
    "dp": ("llama-tiny", "dp=2", 1, ""),
    "dp-uneven": ("llama-odd-tiny", "dp=3", 2, "clip grad_norm = 1.0"),
    "accumulate": ("llama-small", "dp=2", 4, ""),
    "dropout": ("gpt-tiny", "dp=2", 2, ""),
    "tied": ("gpt-tied-tiny", "dp=2", 2, ""),
    "frozen": ("lora-tiny", "dp=2", 1, ""),
    "encdec": ("encdec-tiny", "dp=2", 2, ""),
    "vit": ("vit-tiny", "dp=2", 2, ""),
    "batchnorm": ("resnet-tiny", "dp=2", 1, ""),
    "inplace": ("c43_inplace", "dp=2", 2, ""),
    "mask": ("c33_doc_mask", "dp=2", 1, ""),
    "full": ("llama-small", "dp=2", 2, 'recompute "layers.*" = full'),
    "selective": ("llama-small", "dp=2", 2, 'recompute "layers.*" = selective'),
    "tp": ("llama-small", "dp=2 tp=2", 1, LLAMA % "off"),
    "tp-sequence": ("llama-small", "dp=2 tp=2", 2, LLAMA % "on" + 'recompute "layers.*" = selective'),
    "tp-full": ("llama-tiny", "dp=2 tp=2", 1, LLAMA % "on" + 'recompute "layers.*" = full'),
    "tp-uneven": ("llama-odd-tiny", "tp=3", 1, LLAMA % "on"),
    "tp-pieces": ("llama-odd-tiny", "tp=2", 1, LLAMA.replace("sequence = %s", "sequence = on, overlap = on")),
    "tp-pieces-whole": ("llama-tiny", "tp=2", 1, LLAMA.replace("sequence = %s", "overlap = on")),
    "zero-1": ("llama-small", "dp=2", 2, "zero over dp { stage = 1 }\nclip grad_norm = 1.0"),
    "zero-2": ("gpt-tiny", "dp=4", 2, "zero over dp { stage = 2, bucket = 4kB }"),
    "zero-3": ("llama-small", "dp=4", 2, "zero over dp { stage = 3, bucket = 100kB, prefetch = 1 }"),
    "zero-uneven": ("llama-odd-tiny", "dp=3", 1, "zero over dp { stage = 3, persist_below = 100 }"),
    "zero-tp": ("llama-small", "dp=2 tp=2", 1, LLAMA % "on" + "zero over dp { stage = 3, bucket = 100kB }"),
    "pipeline": ("llama-small", "pp=2 dp=2", 1, "pipeline over pp { schedule = 1f1b, microbatches = 4 }"),
    "pipeline-tied": (
        "gpt-tied-tiny",
        "pp=2 tp=1",
        1,
        "pipeline over pp { schedule = zb_h1, microbatches = 2 }\nclip grad_norm = 1.0",
    ),
    "pipeline-interleaved": (
        "llama-small",
        "pp=2 tp=2",
        1,
        LLAMA % "on" + "pipeline over pp { schedule = interleaved, microbatches = 2, virtual = 2 }",
    ),
    "pipeline-zero": (
        "llama-small",
        "pp=2 dp=2",
        1,
        "pipeline over pp { schedule = 1f1b, microbatches = 2 }\nzero over dp { stage = 2, bucket = 100kB }",
    ),
    "hybrid": ("llama-odd-tiny", "dp=4", 1, "zero over dp { stage = 3, hybrid = 2 }"),
    "bf16": (
        "llama-small",
        "dp=2",
        2,
        "precision { compute = bf16, reduce = fp32, master = fp32 }\nzero over dp { stage = 2 }\nclip grad_norm = 1.0",
    ),
    "fp16": ("llama-tiny", "dp=2", 1, "precision { compute = fp16, master = fp32, loss_scale = dynamic }"),
    "overlap": ("llama-small", "tp=2", 1, LLAMA.replace("sequence = %s", "sequence = on\n    overlap = on")),
    "offload": ("llama-tiny", "dp=2", 2, "zero over dp { stage = 2, offload = optimizer }"),
}
"""Name → zoo entry, mesh, micro-batches, further statements."""


def plan_of(name: str, batch: int = 8) -> Plan:
    entry, mesh, microbatches, extra = PLANS[name]
    return loads(plan_text(get(entry), batch, mesh, microbatches, extra))
