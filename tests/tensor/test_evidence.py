"""What tensor and sequence parallelism promise (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; Korthikanti et al.
2022, https://arxiv.org/abs/2205.05198): these communications and no others, these bytes, this memory."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from compiler.autodiff.local import communicated_axes
from compiler.driver import Compilation
from compiler.ir.graph import Node
from runtime.transport.calls import sent_bytes
from tests.tensor.models import block, collectives, llama

BATCH, SEQ, DIM, ITEM = 4, 8, 64, 4
ACTIVATION = BATCH * SEQ * DIM * ITEM
"""Bytes of a whole activation between layers: b s h."""
SIZES = dict(heads=8, kv_heads=8, dim=DIM, hidden=128, layers=2)


def sent(nodes: Iterable[Node], ways: int) -> int:
    """Bytes that a rank sends, each collective as a bandwidth-optimal algorithm would."""
    total = 0
    for node in nodes:
        if communicated_axes(node):
            whole = max(node.args[0].nbytes, node.outputs[0].nbytes)
            total += sent_bytes(node.op.removeprefix("planc."), ways, whole)
    return total


def layer(compilation: Compilation):  # type: ignore[no-untyped-def]
    """The code of a layer."""
    return compilation.linked.kinds["layers"].recorded


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.full), 8])
def test_bytes_of_a_block(tp: int, sequence: bool) -> None:
    """Forward, as backward: two all-reduces of b s h, 2 (t - 1) / t each. With sequence parallelism each is a gather
    and a scattered sum of half as much, so the bytes are the same."""
    compilation, _, _ = block(llama(tp, sequence=sequence, **SIZES))
    code = layer(compilation)
    assert sent(code.forward, tp) == sent(code.backward, tp) == 2 * 2 * ACTIVATION * (tp - 1) // tp


def test_bytes_of_a_block_do_not_depend_on_the_heads() -> None:
    compilation, _, _ = block(llama(8, sequence=True, **SIZES | {"kv_heads": 1}))
    assert sent(layer(compilation).forward, 8) == 4 * ACTIVATION * 7 // 8


def kept(compilation: Compilation) -> tuple[int, int]:
    """Of a layer and a micro-batch, in bytes: saved values, and the activation that enters and is read again."""
    code = layer(compilation)
    entering = code.arguments[0]
    assert entering.kind != "param" and 0 in code.needed
    return sum(value.nbytes for value in code.saved), entering.nbytes


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.full), 4])
def test_what_the_backward_needs_falls_by_tp(tp: int) -> None:
    """Everything that a block keeps is cut. Without recomputation alone the two gathered inputs are kept whole, since
    there nothing is done twice, communication neither."""
    recomputed = '\nrecompute "layers.*" = selective\n'
    one, entering = kept(block(llama(1, **SIZES))[0])
    few, _ = kept(block(llama(1, **SIZES) + recomputed)[0])
    cut = kept(block(llama(tp, sequence=True, **SIZES))[0])
    assert cut == (one // tp + 2 * (ACTIVATION - ACTIVATION // tp), entering // tp)
    assert kept(block(llama(tp, sequence=True, **SIZES) + recomputed)[0]) == (few // tp, entering // tp)


def test_without_sequence_parallelism_norms_and_residuals_are_kept_whole() -> None:
    """What sequence parallelism is for: 5 whole activations and 2 reciprocal deviations, more than all the rest."""
    one, _ = kept(block(llama(1, **SIZES))[0])
    whole = 5 * ACTIVATION + 2 * ACTIVATION // DIM
    assert kept(block(llama(4, **SIZES))[0])[0] == (one - whole) // 4 + whole


def test_selective_recomputation_gathers_again_as_megatron_does() -> None:
    text = llama(4, sequence=True, **SIZES) + '\nrecompute "layers.*" = selective\n'
    _, forward, backward = block(text)
    assert forward == {"all_gather": 2, "reduce_scatter": 2}
    assert backward == {"all_gather": 2 + 2, "reduce_scatter": 2}, "the inputs of the column layers, for their weights"


def test_gradients_of_norms_are_summed_with_their_bucket() -> None:
    """And nothing else is, besides what is replicated: not in a segment, not for each micro-batch."""
    compilation, _, _ = block(llama(4, sequence=True, **SIZES))
    summed = {name for bucket in compilation.program.buckets if bucket.axes for name in bucket.parameters}
    assert summed == {"norm.weight", *(f"layers.{k}.{name}_norm.weight" for k in range(2) for name in ("attn", "mlp"))}
    for kind in compilation.linked.kinds.values():
        assert "all_to_all" not in collectives([*kind.recorded.forward, *kind.recorded.backward])
