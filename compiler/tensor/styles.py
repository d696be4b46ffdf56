"""Styles: `column`, `row` and `vocab` layers as layouts of their parameters.

A style says along which factor of the operator that uses it a weight is cut:

    column   a factor of the result that no other operand has: each rank makes some of the outputs
    row      a factor that is summed over: each rank adds a term
    vocab    of an embedding its rows, of a linear layer its outputs

so it serves linear layers, transposed ones (`Conv1D`), convolutions and plain matrix products alike. What follows from
the layouts (Megatron's f and g, the reduction of norm weights) is the business of propagation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from compiler.diagnostics import Diagnostics, closest
from compiler.dsl.plan import Pattern, Plan
from compiler.ir.graph import Graph, Node, Value
from compiler.layout.factors import shard_for
from compiler.layout.placement import Layout, Mesh, Placement, R, Shard, V, normal
from compiler.layout.rule import Rule, rule_of
from compiler.tensor.divide import Division
from compiler.tensor.indices import Index, follow, leaves

STYLES = ("column", "row", "vocab", "replicate")


@dataclass(frozen=True)
class Styled:
    """A parameter that a pattern of a style names."""

    value: Value
    style: str
    pattern: Pattern


@dataclass(frozen=True)
class Styles:
    """What the styles make of the mesh and of parameters, by name."""

    mesh: Mesh
    layouts: Mapping[str, Layout]


def tensor_styles(plan: Plan, graph: Graph, mesh: Mesh) -> Styles:
    """Where the plan's patterns put the parameters over the tensor axes, which this may split into sub-axes. Raises
    PlanError for a pattern that fits nothing."""
    axes = mesh.parts(*plan.tensor.axes) if plan.tensor is not None else ()
    if not axes:
        return Styles(mesh, {})
    found = Diagnostics()
    cuts = style_cuts(plan, graph, found)
    found.raise_if_errors(plan.sources)
    known = follow(graph, {value: shard.dim for value, shard in cuts.items()})
    runs = {value: [i for i in leaves(known[value][shard.dim]) if not i.whole] for value, shard in cuts.items()}
    division = Division(mesh, axes)
    for run in sorted(runs.values(), key=len, reverse=True):
        division.divide(run)
    mesh = mesh.split(division.sub_axes())
    parts = mesh.parts(*axes)
    layouts = {}
    for value, shard in cuts.items():
        indices = leaves(known[value][shard.dim])
        if runs[value] or all(index.beside for index in indices):
            layouts[value.name] = index_layout(value, shard.dim, indices, division, mesh, parts)
        else:  # every operator that reads it needs all of it: cut as asked, and gathered behind the layer
            layouts[value.name] = Layout((axis, shard) for axis in parts)
    return Styles(mesh, layouts)


def style_cuts(plan: Plan, graph: Graph, found: Diagnostics) -> dict[Value, Shard]:
    """The dimension (whole: without regard to what it is made of) along which each named parameter is to be cut."""
    users = graph.users()
    cuts: dict[Value, Shard] = {}
    for item in styled(plan, graph, found):
        if item.style != "replicate" and item.value not in cuts:
            shards = (cut(item.style, item.value, node) for node in users.get(item.value, ()))
            shard = next(filter(None, shards), None)
            if shard is not None:
                cuts[item.value] = shard
    return cuts


def index_layout(
    value: Value, dim: int, indices: Sequence[Index], division: Division, mesh: Mesh, axes: Sequence[str]
) -> Layout:
    """Each index cut over its axes. Over those that cut none of a parameter's, it is used in work that differs."""
    places: dict[str, Placement] = {axis: V if value.differentiable else R for axis in axes}
    outer = 1
    for index in indices:
        unit = value.shape[dim] // (outer * index.size)
        over = division.cut_by(index, mesh)
        ways = math.prod(mesh.size(axis) for axis in over)
        places |= dict.fromkeys(over, normal(Shard(dim, outer, unit), value.shape[dim], ways))
        outer *= index.size
    return Layout(places)


def styled(plan: Plan, graph: Graph, found: Diagnostics) -> Iterator[Styled]:
    """The parameters that the plan's patterns name, by module path or by their own name."""
    strategy = plan.tensor
    assert strategy is not None
    parameters = [value for value in graph.inputs if value.kind == "param"]
    for style in STYLES:
        for pattern in getattr(strategy, style):
            hits = [value for value in parameters if names(pattern, value.name)]
            if not hits:
                report_no_match(found, style, pattern, parameters)
            for value in hits:
                yield Styled(value, style, pattern)


def names(pattern: Pattern, parameter: str) -> bool:
    """Whether a pattern names a parameter, or the module that has it."""
    module = parameter.rpartition(".")[0]
    return pattern.matches(parameter) or bool(module) and pattern.matches(module)


def report_no_match(found: Diagnostics, style: str, pattern: Pattern, parameters: Sequence[Value]) -> None:
    modules = list(dict.fromkeys(value.name.rpartition(".")[0] for value in parameters))
    near = closest(pattern.text, modules)
    found.error(
        "E205",
        f'`{style} "{pattern.text}"` names no module with parameters',
        pattern.span,
        help=f"did you mean `{near}`?" if near else f"modules with parameters: {', '.join(modules[:8])}, …",
    )


def cut(style: str, value: Value, node: Node) -> Shard | None:
    """The cut of `value` that the style asks for where `node` uses it, or None if there is none (a bias of a row)."""
    rule = rule_of(node)
    for k, operand in enumerate(node.inputs):
        if operand is value:
            factor = style_factor(style, k, rule)
            if factor is not None:
                return shard_for(factor, rule.operands[k], rule, value.shape, 1)
    return None


def style_factor(style: str, k: int, rule: Rule) -> str | None:
    own = [name for names in rule.operands[k] for name in names]
    in_results = {name for dims in rule.results if dims is not None for names in dims for name in names}
    others = {
        name
        for j, dims in enumerate(rule.operands)
        if j != k and j not in rule.addends
        for names in dims
        for name in names
    }
    if style == "row":
        return next((name for name in own if name not in in_results), None)
    if style == "vocab" and "v" in own:
        return "v"
    if k in rule.addends:
        return next((name for name in own if name in in_results), None)
    return next((name for name in own if name in in_results and name not in others), None)
