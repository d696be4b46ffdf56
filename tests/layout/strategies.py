"""Random meshes, and random layouts that are legal on them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from compiler.ir.graph import Value
from compiler.layout.joined import in_pieces
from compiler.layout.placement import Layout, Mesh, P, Placement, R, Shard, V, normal


def bounded(examples: int) -> settings:
    """The same few examples in every run; `EXAMPLES=20 pytest` looks at twenty times as many."""
    return settings(
        max_examples=examples * int(os.environ.get("EXAMPLES", "1")),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],  # no shrinking: the examples are small already
        suppress_health_check=list(HealthCheck),
    )


AXES = ("dp", "tp", "cp")


@st.composite
def meshes(draw: st.DrawFn, most: int = 2) -> Mesh:
    """One or two axes of 1 to 4 ranks (at most 8 together)."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=most).filter(lambda sizes: math.prod(sizes) <= 8))
    return Mesh(tuple(zip(AXES, sizes)))


def factorizations(draw: st.DrawFn, size: int) -> list[int]:
    """The dimension as a product of one to three factors."""
    factors = []
    while size > 1 and len(factors) < 2 and draw(st.integers(0, 3)) == 0:
        factor = draw(st.sampled_from([k for k in range(2, size + 1) if size % k == 0]))
        factors.append(factor)
        size //= factor
    return [*factors, size]


@st.composite
def compositions(draw: st.DrawFn, count: int, ways: int) -> tuple[int, ...]:
    """One to three pieces of `count`, each of which divides among so many ranks; one alone where none do."""
    each = count // ways
    if count % ways or each < 2:
        return (count,)
    edges = sorted({0, each, *draw(st.lists(st.integers(1, each - 1), max_size=2))})
    return tuple(ways * (b - a) for a, b in zip(edges, edges[1:]))


@st.composite
def layouts(draw: st.DrawFn, value: Value, mesh: Mesh) -> Layout:
    """Cuts of any dimension at any factor, several axes at one factor too; `V` and `P` for what can be learnt."""
    dims = [factorizations(draw, size) for size in value.shape]
    places = [(dim, k) for dim, factors in enumerate(dims) for k, size in enumerate(factors) if size > 1]
    orders = {place: draw(st.sampled_from(("", "", "zigzag", "pieces"))) for place in places}
    chosen: dict[tuple[int, int], tuple[int, ...]] = {}
    picked: dict[str, tuple[int, int] | Placement] = {}
    for axis in mesh.names:
        whole: Sequence[Placement] = (R, V, P) if value.differentiable else (R,)
        cut = places and draw(st.integers(0, 3)) != 0
        picked[axis] = draw(st.sampled_from(places)) if cut else draw(st.sampled_from(whole))
    found: dict[str, Placement] = {}
    for axis, place in picked.items():
        if isinstance(place, tuple):
            dim, k = place
            ways = math.prod(mesh.size(other) for other, at in picked.items() if at == place)
            outer, unit = math.prod(dims[dim][:k]), math.prod(dims[dim][k + 1 :])
            if orders[dim, k] == "pieces":
                if (dim, k) not in chosen:
                    chosen[dim, k] = draw(compositions(dims[dim][k], ways))
                place = normal(in_pieces(Shard(dim, outer, unit), chosen[dim, k]), value.shape[dim], ways)
            else:
                place = normal(Shard(dim, outer, unit, orders[dim, k]), value.shape[dim], ways)
        found[axis] = place
    return Layout(found)
