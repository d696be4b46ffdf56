"""Rank layout and groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.mesh import Mesh

MESH = Mesh((("pp", 2), ("dp", 3), ("tp", 2)))

sizes = st.lists(st.integers(1, 4), max_size=4)


def make(numbers):
    return Mesh(tuple((f"a{i}", n) for i, n in enumerate(numbers)))


def test_the_last_axis_is_fastest():
    assert MESH.coords(5) == {"pp": 0, "dp": 2, "tp": 1}
    assert list(MESH.coords(5)) == ["pp", "dp", "tp"]
    assert MESH.group(5, ("tp",)) == (4, 5)
    assert MESH.group(5, ("dp",)) == (1, 3, 5)
    assert MESH.group(5, ("pp",)) == (5, 11)


def test_a_group_ignores_the_order_of_its_axes():
    assert MESH.group(0, ("tp", "pp")) == MESH.group(0, ("pp", "tp")) == (0, 1, 6, 7)


def test_groups_of_no_axis_or_of_size_one():
    mesh = Mesh((("dp", 2), ("tp", 1)))
    assert mesh.groups(()) == mesh.groups(("tp",)) == ((0,), (1,))
    assert Mesh(()).size == 1
    assert Mesh(()).coords(0) == {}


@given(sizes, st.data())
def test_groups_partition_the_ranks(numbers, data):
    mesh = make(numbers)
    axes = tuple(data.draw(st.sets(st.sampled_from(mesh.names)))) if mesh.names else ()
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert list(group) == sorted(group)
        assert all(mesh.group(rank, axes) == group for rank in group)
        fixed = {tuple(mesh.coords(rank)[name] for name in mesh.names if name not in axes) for rank in group}
        assert len(fixed) == 1


@given(sizes)
def test_coordinates_round_trip(numbers):
    mesh = make(numbers)
    assert [mesh.rank(mesh.coords(rank)) for rank in range(mesh.size)] == list(range(mesh.size))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Mesh((("dp", 2), ("dp", 3))), "distinct names"),
        (lambda: Mesh((("dp", 0),)), "'dp' must have size 1 or more"),
        (lambda: MESH.coords(12), "rank 12 is outside"),
        (lambda: MESH.rank({"pp": 0, "dp": 3, "tp": 0}), "dp=3 is outside axis dp=3"),
        (lambda: MESH.rank({"pp": 0}), "coordinates name"),
        (lambda: MESH.group(0, ("cp",)), "no mesh axis 'cp'"),
    ],
)
def test_errors_name_the_fault(act, message):
    with pytest.raises((ValueError, KeyError), match=message):
        act()
