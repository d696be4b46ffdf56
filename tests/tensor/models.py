"""What the tests of tensor parallelism share: plan texts of Llamas, and the collectives of a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from compiler.driver import Compilation, compile
from compiler.dsl import loads
from compiler.ir.graph import Node

COLLECTIVES = ("planc.all_reduce", "planc.all_gather", "planc.reduce_scatter", "planc.all_to_all")


def llama(tp: int, heads: int = 8, kv_heads: int = 2, sequence: bool = False, mesh: str = "", **sizes: int) -> str:
    """A plan for two layers; `mesh` names more axes in front of `tp`, of which `dp` cuts the batch."""
    options = dict(layers=2, dim=4 * heads, heads=heads, kv_heads=kv_heads, vocab=32, context=16, hidden=64) | sizes
    data = "data over dp\n" if "dp" in mesh else ""
    return f"""
model "dsl_examples.models.llama:Llama" {{ {", ".join(f"{key} = {value}" for key, value in options.items())} }}
batch = 4
seq = 8
input tokens : int64[batch, seq]
input labels : int64[batch, seq]
mesh {mesh} tp={tp}
{data}tensor over tp {{
    style  = manual
    column "layers.*.attn.w[qkv]", "layers.*.mlp.w[13]"
    row    "layers.*.attn.wo", "layers.*.mlp.w2"
    vocab  "embed", "head"
    sequence = {"on" if sequence else "off"}
}}
optimizer adamw {{ lr = 1e-3, weight_decay = 0.1 }}
clip grad_norm = 1.0
"""


def collectives(nodes: Iterable[Node]) -> Counter[str]:
    """How many of each collective local code has."""
    return Counter(node.op.removeprefix("planc.") for node in nodes if node.op in COLLECTIVES)


def block(plan: str) -> tuple[Compilation, Counter[str], Counter[str]]:
    """The compiled plan, and the collectives of a layer forward and backward."""
    compilation = compile(loads(plan, "tensor.plan"))
    code = compilation.linked.kinds["layers"].recorded
    return compilation, collectives(code.forward), collectives(code.backward)
