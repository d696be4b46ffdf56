"""Where the plan itself says that stages begin: `split before "layers.4"`, and `split = equal`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compiler.diagnostics import Diagnostics, closest, declare_codes
from compiler.dsl.plan import Pattern, Plan
from compiler.pipeline.loads import Load

declare_codes(
    {
        "E230": "a split point at which no stage can begin",
        "E231": "split points that make another number of stages than the pipeline has",
        "E232": "more pipeline stages than there are segments to run on them",
    }
)


def split_points(plan: Plan, loads: Sequence[Load], stages: int) -> tuple[int, ...]:
    """The first call of each stage, by the patterns of `split before`. Raises PlanError."""
    assert plan.pipeline is not None
    found = Diagnostics()
    begins = [set(beginnings(loads, k)) for k in range(len(loads))]
    points: dict[int, None] = {0: None}
    for pattern in plan.pipeline.split_before:
        hits = [k for k, paths in enumerate(begins) if any(pattern.matches(path) for path in paths)]
        if not hits:
            report_no_beginning(found, loads, begins, pattern)
        points |= dict.fromkeys(hits)
    if not found.items and len(points) != stages:
        spans = [pattern.span for pattern in plan.pipeline.split_before]
        at = ", ".join(f"`{loads[k].name}`" for k in sorted(points) if k)
        found.error(
            "E231",
            f"the split points make {len(points)} stages, the pipeline has {stages}",
            spans[0].to(spans[-1]),
            label=f"stages begin at {at}" if at else "the first stage begins here anyway",
            help=f"name {stages - 1} modules at which a stage begins",
        )
    found.raise_if_errors(plan.sources)
    return tuple(sorted(points))


def beginnings(loads: Sequence[Load], k: int) -> Iterator[str]:
    """The modules of which call k runs the first operator: a stage may begin there."""
    if loads[k].modules:
        path, earlier = loads[k].modules[0], {m for load in loads[:k] for m in load.modules}
        while path:
            if not any(other == path or other.startswith(f"{path}.") for other in earlier):
                yield path
            path = path.rpartition(".")[0]


def report_no_beginning(
    found: Diagnostics, loads: Sequence[Load], begins: Sequence[set[str]], pattern: Pattern
) -> None:
    inside = next(
        (load for load in loads for path in load.modules if any(pattern.matches(part) for part in prefixes(path))), None
    )
    places = [path for paths in begins[1:] for path in sorted(paths, key=len)[:1]]
    near = None if inside is not None else closest(pattern.text, places)
    found.error(
        "E230",
        f'`split before "{pattern.text}"` names no module at which a stage can begin',
        pattern.span,
        label=f"in the middle of segment `{inside.name}`" if inside is not None else "no such module runs",
        help=f"did you mean `{near}`?" if near else f"stages can begin at {', '.join(f'`{p}`' for p in places[:8])}, …",
    )


def prefixes(path: str) -> Iterator[str]:
    """a.b.c, a.b, a."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def equal_points(plan: Plan, loads: Sequence[Load], stages: int) -> tuple[int, ...]:
    """The first call of each stage, if each has the same number of repeated units, or one more. What stands in front of
    the first unit belongs to the first stage, what follows a unit to that unit's. Raises PlanError."""
    assert plan.pipeline is not None
    first: dict[str, int] = {}
    for k, load in enumerate(loads):
        if load.unit:
            first.setdefault(load.unit, k)
    if len(first) < stages:
        found = Diagnostics()
        found.error(
            "E232",
            f"{stages} stages of equal numbers of layers, but there are {len(first)} layers",
            plan.pipeline.given.get("split", plan.pipeline.span),
            help=f"use at most {len(first)} stages" if first else "use `split = auto`",
        )
        found.raise_if_errors(plan.sources)
    starts = list(first.values())
    return (0, *(starts[-(-len(starts) * stage // stages)] for stage in range(1, stages)))
