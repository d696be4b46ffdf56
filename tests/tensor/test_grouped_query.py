"""Grouped-query attention with any number of key/value heads over any number of ranks: exact, and without a gather."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compiler.analysis.verify import TOLERANCE, random_batch, verify
from compiler.driver import Options, compile
from compiler.dsl import loads
from compiler.layout.placement import Shard
from runtime.program import load
from runtime.simulate import simulate
from tests.tensor.models import block, llama

CASES = {  # (heads, kv_heads, tp): the sub-axes that tp is split into
    (8, 2, 8): (2, 4),
    (8, 2, 4): (2, 2),
    (8, 2, 2): (2,),
    (8, 1, 8): (8,),  # multi-query: the groups alone are cut
    (6, 1, 4): (4,),  # 6 query heads on 4 ranks: the last two have one and none
    (6, 3, 2): (2,),  # one of the two query heads of each group
    (6, 3, 4): (4,),  # a group each, the last rank has none
    (6, 3, 6): (3, 2),
    (12, 3, 8): (4, 2),
    (12, 2, 8): (2, 4),
    (4, 4, 8): (8,),
}
FULL = {case for case in CASES if case not in ((8, 2, 8), (6, 3, 2), (6, 3, 6), (6, 1, 4))}


@pytest.mark.parametrize(
    ("case", "sequence"),
    [pytest.param(c, s, marks=pytest.mark.full if c in FULL and not s else ()) for c in CASES for s in (False, True)],
    ids=str,
)
def test_a_block_communicates_as_megatron_does(case: tuple[int, int, int], sequence: bool) -> None:
    heads, kv_heads, tp = case
    compilation, forward, backward = block(llama(tp, heads, kv_heads, sequence))
    each = {"all_gather": 2, "reduce_scatter": 2} if sequence else {"all_reduce": 2}
    assert forward == each
    assert backward == each
    assert tuple(size for axis, size in compilation.mesh.axes if axis.startswith("tp")) == CASES[case]


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.full if c in FULL else ()) for c in CASES], ids=str)
def test_equal_to_one_device(case: tuple[int, int, int], sequence: bool) -> None:
    heads, kv_heads, tp = case
    verdict = verify(loads(llama(tp, heads, kv_heads, sequence), "tensor.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


def test_with_data_parallelism() -> None:
    verdict = verify(loads(llama(4, 8, 2, True, mesh="dp=2"), "tensor.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


def test_what_lacks_an_index_is_replicated_and_its_gradient_summed_once() -> None:
    compilation, _, _ = block(llama(8, 8, 2, mesh="dp=2"))
    main, program = compilation.assigned.main, compilation.program
    layouts = {value.name: str(value.layout) for value in main.inputs if "layers.0.attn.w" in value.name}
    assert layouts["layers.0.attn.wq.weight"] == "{dp: V, micro: V, tp.0: S(0), tp.1: S(0, outer=2)}"
    assert layouts["layers.0.attn.wk.weight"] == "{dp: V, micro: V, tp.0: S(0), tp.1: V}"
    assert layouts["layers.0.attn.wo.weight"] == "{dp: V, micro: V, tp.0: S(1), tp.1: S(1, outer=2)}"
    over = {name: bucket.axes for bucket in program.buckets for name in bucket.parameters}
    assert over["layers.0.attn.wk.weight"] == ("dp", "tp.1") and over["layers.0.attn.wq.weight"] == ("dp",)


def test_collectives_over_the_whole_axis_are_one_step() -> None:
    compilation, _, _ = block(llama(8, 8, 2, sequence=True))
    assert compilation.program.groups == (("tp.0", "tp.1"),)
    cut = {place for value in compilation.assigned.main.values() for axis, place in value.layout.items() if axis == "tp.0"}
    assert Shard(1) in cut, "activations are cut along the sequence over both sub-axes"


def test_the_program_names_the_axis_of_the_plan() -> None:
    compilation, _, _ = block(llama(8, 8, 2, mesh="pp=1 dp=2"))
    assert compilation.program.mesh == {"pp": 1, "dp": 2, "tp.0": 2, "tp.1": 4}
    assert compilation.program.axes == {"pp": 1, "dp": 2, "tp": 8}
    asked = {item.request: item for item in compilation.asked}
    assert asked['column "layers.*.attn.w[qkv]"'].outcome == "applied"


@pytest.mark.parametrize("heads", [(8, 2), (6, 3)], ids=["even", "uneven"])
def test_checkpoints_over_sub_axes(tmp_path: Path, heads: tuple[int, int]) -> None:
    """Two steps each over sub-axes, over one axis and on one device are six steps on one device."""

    def run(tp: int, first: int, last: int, restore: Path | None = None, save: Path | None = None):  # type: ignore[no-untyped-def]
        plan = loads(llama(tp, *heads, sequence=True), "tensor.plan")
        program = load(compile(plan, options=Options(widen=True)).write(tmp_path / f"program-{tp}"))
        batches = [random_batch(program, step) for step in range(first, last)]

        def body(session):  # type: ignore[no-untyped-def]
            if restore:
                session.restore(restore)
            losses = [session.step(batch).loss for batch in batches]
            if save:
                session.save(save)
            return losses, session.state_dict()

        return simulate(program, body)

    truth, path = run(1, 0, 6)[0], None
    for turn, tp in enumerate((8 if heads == (8, 2) else 4, 2, 1)):
        first, save = 2 * turn, tmp_path / f"step-{turn}"
        results = run(tp, first, first + 2, path, save)
        for losses, _ in results:
            assert losses == pytest.approx(truth[0][first : first + 2], rel=1e-11)
        path = save
    for name, tensor in truth[1].items():
        torch.testing.assert_close(results[0][1][name], tensor, rtol=1e-9, atol=1e-9)
