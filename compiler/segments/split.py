"""Splitting: where a graph is cut, and what crosses the cuts.

The graph is cut at module boundaries: each element of a repeated list (`layers.0`, `layers.1`, …) is a segment, and so
is what stands before, between and after, and a module that the plan names (`segment "layers.*.mlp"`). Nodes keep their
order; a segment is a run of consecutive nodes of one unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from compiler.dsl.plan import Pattern
from compiler.ir.graph import Graph, Node, Value


@dataclass
class Segment:
    """A run of nodes. `name` is unique ("layers.3"); `unit` is the module path it was cut for ("" between units)."""

    name: str
    unit: str
    nodes: list[Node]
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)


def units(
    lists: Mapping[str, Sequence[str]], classes: Mapping[str, str], extra: Iterable[Pattern] = (),
    points: Iterable[Pattern] = (),
) -> list[str]:  # fmt: skip
    """Module paths that become segments: elements of lists whose elements are of one class; the outermost modules that
    each pattern of `extra` fits, which take the place of elements inside of them, and may lie in others; and those at
    which a pipeline stage begins (`points`), unless they hold or lie in one of the others."""
    found: list[str] = []
    for path, children in lists.items():
        kinds = {classes.get(child) for child in children}
        if len(kinds) == 1:
            found += children
    asked = [path for p in extra for path in outermost([path for path in classes if path and p.matches(path)])]
    found += asked
    for pattern in points:
        named = [path for path in classes if path and pattern.matches(path)]
        found += [path for path in named if not any(related(path, other) for other in found)]
    return list(dict.fromkeys([*outermost(found), *asked]))


def outermost(paths: Sequence[str]) -> list[str]:
    """Those that lie in none of the others."""
    return [path for path in dict.fromkeys(paths) if not any(path.startswith(f"{other}.") for other in paths)]


def related(path: str, other: str) -> bool:
    """Whether one module holds the other."""
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def split(graph: Graph, unit_paths: Sequence[str]) -> list[Segment]:
    """The segments of a graph, in execution order, with what each reads and makes for others."""
    known = set(unit_paths)
    segments: list[Segment] = []
    for node in graph.nodes:
        unit = unit_of(node.origin.module, known)
        if not segments or segments[-1].unit != unit:
            segments.append(Segment("", unit, []))
        segments[-1].nodes.append(node)
    _name(segments)
    connect(graph, segments)
    return segments


def unit_of(module: str, known: set[str]) -> str:
    """The innermost unit that a module path lies in, or ""."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in known:
            return prefix
    return ""


def _name(segments: list[Segment]) -> None:
    taken: dict[str, int] = {}
    for k, segment in enumerate(segments):
        between = "begin" if k == 0 else "end" if k == len(segments) - 1 else "between"
        base = segment.unit or ("whole" if len(segments) == 1 else between)
        count = taken[base] = taken.get(base, 0) + 1
        segment.name = base if count == 1 else f"{base}.part{count}"


def connect(graph: Graph, segments: list[Segment]) -> None:
    """Find what each segment reads from outside, and what it makes for others or for the graph's outputs."""
    home = {out: segment for segment in segments for node in segment.nodes for out in node.outputs if out is not None}
    leaving = dict.fromkeys(graph.outputs.values())
    for segment in segments:
        reads = dict.fromkeys(value for node in segment.nodes for value in node.inputs)
        segment.inputs = [value for value in reads if home.get(value) is not segment]
        leaving |= {value: None for value in segment.inputs if value in home}
    for segment in segments:
        made = [out for node in segment.nodes for out in node.outputs if out is not None]
        segment.outputs = [value for value in made if value in leaving]
