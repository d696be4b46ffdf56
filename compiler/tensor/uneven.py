"""Uneven parts: where more is padding than is worth it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from compiler.diagnostics import Diagnostics, declare_codes
from compiler.dsl.plan import Plan
from compiler.ir.graph import Value
from compiler.layout.placement import Shard, shard_axes
from compiler.tensor.layouts import Divided

declare_codes({"W032": "layers that do not divide among the tensor-parallel ranks"})

TOO_MUCH = 1.25
"""Padded work over real work from which on there is a warning."""


def uneven_parts(plan: Plan, result: Divided, dims: Mapping[Value, int], found: Diagnostics) -> None:
    """Warn of parameters whose parts are padded to much more than the whole, once for each number of units."""
    worst: dict[tuple[int, int, int], list[str]] = {}
    for value, dim in dims.items():
        for key in _cuts(value, result, dim):
            worst.setdefault(key, []).append(value.name)
    for (count, unit, ways), names in worst.items():
        if math.ceil(count / ways) * ways < TOO_MUCH * count:
            continue
        assert plan.tensor is not None
        more = 100 * (math.ceil(count / ways) * ways / count - 1)
        each = f" of {unit}" if unit > 1 else ""
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        near = sorted({max((n for n in divisors if n <= ways), default=1), min((n for n in divisors if n >= ways), default=1)})
        multiples = [n for n in (count // ways * ways, -(-count // ways) * ways) if n]
        found.warning(
            "W032",
            f"{count} parts{each} do not divide among {ways} ranks: {more:.0f} % more work and memory",
            plan.tensor.axes_span,
            notes=f"parameters: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
            help=f"{' or '.join(map(str, near))} ranks divide {count}; {ways} ranks divide {' or '.join(map(str, multiples))}",
        )


def _cuts(value: Value, result: Divided, dim: int) -> Iterator[tuple[int, int, int]]:
    """(number of units, size of a unit, number of ranks) of each cut."""
    layout = result.layouts[value, dim]
    for shard in dict.fromkeys(place for place in layout.values() if isinstance(place, Shard)):
        ways = math.prod(result.mesh.size(axis) for axis in shard_axes(layout, shard, result.mesh))
        yield value.shape[shard.dim] // (shard.outer * shard.unit), shard.unit, ways
