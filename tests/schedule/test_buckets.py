"""Buckets: full ones, large parameters alone, small ones together."""

from __future__ import annotations

from compiler.schedule.buckets import Alike, Member, make_buckets

PLAIN = Alike("float32", ("dp",))


def names(*members: Member, cap: int = 4 * 100) -> list[tuple[str, ...]]:
    return [bucket.parameters for bucket in make_buckets(members, cap, lambda name: True)]


def test_buckets_close_when_they_are_full() -> None:
    members = [Member(f"p{k}", (40,), PLAIN) for k in range(5)]
    assert names(*members) == [("p0", "p1"), ("p2", "p3"), ("p4",)]


def test_large_parameters_leave_small_ones_together() -> None:
    members = [Member(f"w{k}", (100, 100), PLAIN) if k % 2 else Member(f"norm{k}", (10,), PLAIN) for k in range(6)]
    assert sorted(names(*members)) == [("norm0", "norm2", "norm4"), ("w1",), ("w3",), ("w5",)]


def test_different_axes_and_dtypes_stay_apart() -> None:
    other, wide = Alike("float32", ("dp", "tp")), Alike("float64", ("dp",))
    assert len(names(Member("a", (2,), PLAIN), Member("b", (2,), other), Member("c", (2,), wide))) == 3


def test_zero_3_groups_by_use() -> None:
    """What one call uses stays together; what several use is alone, so that nothing else is whole for it."""
    cut = Alike("float32", ("dp",), ("dp",), 3)
    members = [
        Member("layer.w", (80,), cut, ("layer",)), Member("layer.norm", (4,), cut, ("layer",)),
        Member("table", (4,), cut, ("begin", "end")), Member("head.norm", (4,), cut, ("end",)),
    ]  # fmt: skip
    assert sorted(names(*members)) == [("layer.w", "layer.norm", "head.norm"), ("table",)]
