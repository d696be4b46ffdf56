"""Against DTensor's own propagation: where neither has to communicate, both say the same about the result."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from compiler.ir.graph import Value
from compiler.layout import placement as ours
from compiler.layout.propagate import propagate
from compiler.layout.redistribute import COLLECTIVES
from tests.layout.test_rules import as_program

WAYS = 2


def t(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64)


INDEX = torch.arange(8).view(4, 2) % 6
CASES: dict[str, tuple[Any, ...]] = {
    "mm": ("aten.mm.default", t(4, 6), t(6, 8)),
    "bmm": ("aten.bmm.default", t(4, 2, 6), t(4, 6, 2)),
    "addmm": ("aten.addmm.default", t(8), t(4, 6), t(6, 8)),
    "add": ("aten.add.Tensor", t(4, 6), t(4, 6)),
    "add, broadcast": ("aten.add.Tensor", t(4, 6), t(6)),
    "mul": ("aten.mul.Tensor", t(4, 6), t(4, 6)),
    "mul by a number": ("aten.mul.Scalar", t(4, 6), 2.0),
    "gelu": ("aten.gelu.default", t(4, 6)),
    "sum": ("aten.sum.default", t(4, 6)),
    "sum over a dimension": ("aten.sum.dim_IntList", t(4, 6), (1,)),
    "amax": ("aten.amax.default", t(4, 6), (1,)),
    "view": ("aten.view.default", t(4, 6, 2), (24, 2)),
    "view, split": ("aten.view.default", t(8, 6), (2, 4, 6)),
    "permute": ("aten.permute.default", t(4, 6, 2), (2, 0, 1)),
    "transpose": ("aten.transpose.int", t(4, 6), 0, 1),
    "unsqueeze": ("aten.unsqueeze.default", t(4, 6), 1),
    "expand": ("aten.expand.default", t(4, 1, 2), (4, 6, 2)),
    "select": ("aten.select.int", t(4, 6), 1, 0),
    "slice": ("aten.slice.Tensor", t(4, 6), 1, 1, 3),
    "cat": ("aten.cat.default", (t(4, 6), t(4, 6)), 1),
    "stack": ("aten.stack.default", (t(4, 6), t(4, 6))),
    "softmax": ("aten._softmax.default", t(4, 6), -1, False),
    "layer_norm": ("aten.native_layer_norm.default", t(4, 6, 8), (8,), t(8), t(8), 1e-5),
    "embedding": ("aten.embedding.default", t(6, 8), INDEX),
    "gather": ("aten.gather.default", t(4, 6), 1, INDEX[:4]),
    "index_select": ("aten.index_select.default", t(6, 8), 0, INDEX.flatten()),
    "cumsum": ("aten.cumsum.default", t(4, 6), 1),
    "tril": ("aten.tril.default", t(2, 4, 6)),
    "clone": ("aten.clone.default", t(4, 6)),
    "where": ("aten.where.self", torch.ones(4, 6, dtype=torch.bool), t(4, 6), t(4, 6)),
}
@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=WAYS, store=FakeStore())
    yield init_device_mesh("cpu", (WAYS,), mesh_dim_names=("x",))
    dist.destroy_process_group()


def theirs(place: ours.Placement) -> Any:
    if isinstance(place, ours.Shard):
        return Shard(place.dim) if place.outer == 1 else _StridedShard(place.dim, split_factor=place.outer)
    return Partial(place.op) if isinstance(place, ours.Partial) else Replicate()


def placements(value: torch.Tensor) -> list[ours.Placement]:
    cuts = [ours.Shard(dim) for dim, size in enumerate(value.shape) if size % WAYS == 0]
    return [ours.R, *cuts, *([ours.P] if value.is_floating_point() else [])]


def by_dtensor(mesh: Any, op: str, args: tuple[Any, ...], places: dict[int, ours.Placement]) -> list[Any] | None:
    """The placements of the results, or None if it communicates or has no strategy."""

    def local(tensor: torch.Tensor) -> DTensor:
        place = theirs(places[id(tensor)])
        part = tensor.chunk(WAYS, place.dim)[0] if isinstance(place, Shard) else tensor
        return DTensor.from_local(part.contiguous(), mesh, [place], run_check=False)

    args = torch.utils._pytree.tree_map(lambda item: local(item) if isinstance(item, torch.Tensor) else item, args)
    namespace, packet, overload = op.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    counting = CommDebugMode()
    try:
        with counting:
            result = function(*args)
    except (NotImplementedError, RuntimeError):
        return None
    if counting.get_total_counts():
        return None
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [plain(item.placements[0]) for item in results]


def plain(place: Any) -> Any:
    """A lookup in part of a table is a partial sum of a kind of its own, which holds the mask it was made with."""
    return Partial(place.reduce_op) if isinstance(place, Partial) else place


def by_us(op: str, args: tuple[Any, ...], places: list[ours.Placement]) -> list[ours.Placement] | None:
    """The same of our propagation."""
    program = as_program(op, args, {})
    layouts = {value: ours.Layout({"x": place}) for value, place in zip(program.graph.inputs, places)}
    for value in program.graph.inputs:
        value.differentiable = False  # casts are free: what is compared is the forward
    found = propagate(program.graph, ours.Mesh((("x", WAYS),)), layouts)
    if any(node.op in COLLECTIVES for node in found.graph.nodes):
        return None
    outs: list[Value] = [found.values[out] for out in program.graph.nodes[0].outputs if out is not None]
    return [out.layout["x"] for out in outs]


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_dtensor(mesh: Any, name: str):
    op, *args = CASES[name]
    tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
    compared = 0
    for places in itertools.product(*map(placements, tensors)):
        expected = by_dtensor(mesh, op, tuple(args), dict(zip(map(id, tensors), places)))
        if expected is None:
            continue
        found = by_us(op, tuple(tuple(a) if isinstance(a, list) else a for a in args), list(places))
        call = f"{op} of {[str(place) for place in places]}"
        if found is None:
            # DTensor passes partial sums on wherever it can; we weigh what the result's reduction will cost.
            assert ours.P in places, f"{call}: DTensor needs no communication ({expected}), we do"
            continue
        compared += 1
        assert [theirs(place) for place in found] == expected, call
    assert compared
