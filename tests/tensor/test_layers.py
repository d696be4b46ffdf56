"""Layers around what is cut: biases of row layers, dropout on both sides, norms by head, padding rows, convolutions."""

from __future__ import annotations

import pytest

from compiler.analysis.verify import TOLERANCE, verify
from compiler.driver import compile
from compiler.dsl import loads
from tests.tensor.models import collectives


def normed(tp: int, kv_heads: int = 2, sequence: bool = False, dropout: float = 0.0, heads: int = 4, mesh: str = "") -> str:
    return f"""
model "tests.tensor.toy:NormedModel" {{ kv_heads = {kv_heads}, heads = {heads}, dim = {4 * heads}, dropout = {dropout} }}
batch = 4
input tokens : int64[batch, 8]
input labels : int64[batch, 8]
mesh {mesh} tp={tp}
{"data over dp" if mesh else ""}
tensor over tp {{
    style  = manual
    column "layers.*.[qkv]", "layers.*.up"
    row    "layers.*.o", "layers.*.down"
    vocab  "embed", "head"
    sequence = {"on" if sequence else "off"}
}}
optimizer sgd {{ lr = 0.1, momentum = 0.9 }}
"""


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    ("tp", "heads", "kv_heads", "dropout"),
    [
        (4, 4, 2, 0.0),
        (4, 4, 2, 0.2),
        (3, 4, 1, 0.2),
        pytest.param(8, 4, 4, 0.2, marks=pytest.mark.full),
        pytest.param(6, 6, 3, 0.2, marks=pytest.mark.full),
        pytest.param(2, 4, 1, 0.0, marks=pytest.mark.full),
    ],
)
def test_equal_to_one_device(tp: int, heads: int, kv_heads: int, dropout: float, sequence: bool) -> None:
    """With dropout, the same elements are dropped as on one device; biases are added once."""
    verdict = verify(loads(normed(tp, kv_heads, sequence, dropout, heads), "normed.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


def test_with_data_parallelism() -> None:
    verdict = verify(loads(normed(4, 2, True, 0.2, mesh="dp=2"), "normed.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_keys_that_come_first_are_not_gathered_either(kv_heads: int) -> None:
    code = compile(loads(normed(4, kv_heads, sequence=True), "normed.plan")).linked.kinds["layers"].recorded
    assert collectives(code.forward) == collectives(code.backward) == {"all_gather": 2, "reduce_scatter": 2}


def channels(tp: int, groups: int) -> str:
    return f"""
model "tests.tensor.toy:Channels" {{ channels = 8, groups = {groups} }}
batch = 4
input images : float32[batch, 3, 6, 6]
input labels : int64[batch]
mesh tp={tp}
tensor over tp {{
    style  = manual
    column "first", "depth", "group"
    row    "last"
}}
optimizer sgd {{ lr = 0.1 }}
"""


@pytest.mark.parametrize(("tp", "groups"), [(2, 4), (4, 4), (4, 2), (3, 4), (2, 1)])
def test_convolutions_are_cut_by_channels(tp: int, groups: int) -> None:
    verdict = verify(loads(channels(tp, groups), "channels.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


def test_channels_that_divide_are_summed_once() -> None:
    kinds = compile(loads(channels(4, 4), "channels.plan")).linked.kinds
    codes = [kind.recorded for kind in kinds.values()]
    assert sum((collectives(code.forward) for code in codes), start=collectives([])) == {"all_reduce": 1}


@pytest.mark.parametrize("tp", [2, 4])
def test_fused_projections_are_cut_inside_their_parts(tp: int) -> None:
    """Equal thirds, parts that differ in size, and heads of (q k v) each: nothing is gathered. Where there are two heads
    of keys for four ranks, keys and values alone are exchanged."""
    plan = f"""
model "tests.cases.c16_fused_qkv:build"
batch = 4
input tokens : int64[batch, 6]
input labels : int64[batch, 6]
mesh tp={tp}
tensor over tp {{
    style  = manual
    column "layers.*.fused"
    row    "layers.*.o"
}}
"""
    kinds = compile(loads(plan, "fused.plan")).linked.kinds.values()
    found = {kind.calls[0]: (collectives(kind.recorded.forward), collectives(kind.recorded.backward)) for kind in kinds}
    megatron = {"all_reduce": 1}
    assert found["layers.0"] == found["layers.2"] == (megatron, megatron)
    shared = megatron if tp == 2 else {"all_reduce": 1, "all_to_all": 2}
    assert found["layers.1"] == (shared, shared)
