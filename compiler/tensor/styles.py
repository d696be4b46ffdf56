"""Styles: `column`, `row` and `vocab` layers as layouts of their parameters.

What a style cuts is said by the rule of the operator that calculates with the weight (`uses.py`), so it serves linear
layers, transposed ones (`Conv1D`), convolutions and plain matrix products alike; how that dimension is divided, by
what it is made of (`divide.py`). What follows from the layouts (Megatron's f and g, the reduction of norm weights) is
the business of propagation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from compiler.diagnostics import Diagnostic, Diagnostics, closest, declare_codes
from compiler.dsl.plan import Pattern, Plan
from compiler.ir.graph import Graph, Value
from compiler.layout.placement import Layout, Mesh, Placement, R
from compiler.tensor.choose import Surroundings, completed
from compiler.tensor.layouts import divided
from compiler.tensor.uneven import uneven_parts
from compiler.tensor.uses import Users, style_dim, ways

STYLES = ("column", "row", "vocab", "replicate")

declare_codes(
    {
        "E260": "a tensor-parallel style that a layer cannot have",
        "W031": "a tensor-parallel style that some of the layers named cannot have",
    }
)


@dataclass(frozen=True)
class Styled:
    """Parameters that a pattern of a style names."""

    style: str
    pattern: Pattern
    values: Sequence[Value]


@dataclass(frozen=True)
class Styles:
    """What the styles make of the mesh and of parameters, by name, and what is to be said of it. `whole`: activations
    that are kept whole once they are."""

    mesh: Mesh
    layouts: Mapping[str, Layout]
    whole: Mapping[Value, Mapping[str, Placement]] = field(default_factory=dict)
    warnings: Sequence[Diagnostic] = ()


def tensor_styles(plan: Plan, graph: Graph, mesh: Mesh, around: Surroundings) -> Styles:
    """Where the plan puts the parameters over the tensor axes, which this may split into sub-axes. Raises PlanError for
    a pattern that fits nothing."""
    axes = mesh.parts(*plan.tensor.axes) if plan.tensor is not None else ()
    if plan.tensor is None or not axes:
        return Styles(mesh, {})
    found = Diagnostics()
    users = graph.users()
    named = {value: item.style for item in reversed(list(styled(plan, graph, users, found))) for value in item.values}
    found.raise_if_errors(plan.sources)
    dims = {value: dim for value, style in named.items() if (dim := style_dim(style, value, users)) is not None}
    whole: Sequence[Value] = ()
    if plan.tensor.style == "auto":
        dims, whole = completed(graph, mesh, axes, named, dims, around)
    result = divided(graph, mesh, axes, {value: (dim,) for value, dim in dims.items()})
    layouts = {value.name: result.layouts[value, dim] for value, dim in dims.items()}
    uneven_parts(plan, result, dims, found)
    return Styles(result.mesh, layouts, {value: dict.fromkeys(result.axes, R) for value in whole}, found.warnings)


def styled(plan: Plan, graph: Graph, users: Users, found: Diagnostics) -> Iterator[Styled]:
    """What the plan's patterns name, by module path or by the parameters' own names; of two, the first counts."""
    strategy = plan.tensor
    assert strategy is not None
    parameters = [value for value in graph.inputs if value.kind == "param"]
    for style in STYLES:
        for pattern in getattr(strategy, style):
            hits = [value for value in parameters if names(pattern, value.name)]
            if not hits:
                report_no_match(found, style, pattern, parameters)
            elif style != "replicate":
                report_no_way(found, style, pattern, hits, users)
            yield Styled(style, pattern, hits)


def names(pattern: Pattern, parameter: str) -> bool:
    """Whether a pattern names a parameter, or the module that has it."""
    module = parameter.rpartition(".")[0]
    return pattern.matches(parameter) or bool(module) and pattern.matches(module)


def module_of(value: Value) -> str:
    return value.name.rpartition(".")[0] or value.name


def report_no_match(found: Diagnostics, style: str, pattern: Pattern, parameters: Sequence[Value]) -> None:
    modules = list(dict.fromkeys(map(module_of, parameters)))
    near = closest(pattern.text, modules)
    found.error(
        "E205",
        f'`{style} "{pattern.text}"` names no module with parameters',
        pattern.span,
        help=f"did you mean `{near}`?" if near else f"modules with parameters: {', '.join(modules[:8])}, …",
    )


MEANING = {
    "column": "cuts what a layer makes, and each rank makes some of it",
    "row": "cuts what a layer sums over, and each rank adds a term",
    "vocab": "cuts the rows of an embedding, or the outputs of a head",
}


def report_no_way(found: Diagnostics, style: str, pattern: Pattern, hits: Sequence[Value], users: Users) -> None:
    """Layers that cannot be cut so: an error if the pattern names no others, else a warning."""
    can = {module_of(value) for value in hits if style_dim(style, value, users) is not None}
    cannot = [value for value in hits if module_of(value) not in can]
    if not cannot:
        return
    modules = list(dict.fromkeys(map(module_of, cannot)))
    others = list(dict.fromkeys(way.style for value in cannot for way in ways(value, users)))
    instead = f'{others[0]} "{modules[0]}"' if others else f'they stay whole: replicate "{modules[0]}"'
    shown = ", ".join(f"`{name}`" for name in modules[:3]) + (", …" if len(modules) > 3 else "")
    has = ", ".join(f"`{name}`" for name in others) or "no way to be cut by itself"
    record = found.warning if can else found.error
    record(
        "W031" if can else "E260",
        f"`{style}` cannot cut {shown}",
        pattern.span,
        notes=(f"`{style}` {MEANING[style]}", f"what calculates with {modules[0]} has {has}"),
        help=instead,
    )
