"""Styles: `column`, `row` and `vocab` layers as layouts of their parameters.

A style says along which factor of the operator that uses it a weight is cut:

    column   a factor of the result that no other operand has: each rank makes some of the outputs
    row      a factor that is summed over: each rank adds a term
    vocab    of an embedding its rows, of a linear layer its outputs

so it serves linear layers, transposed ones (`Conv1D`), convolutions and plain matrix products alike. What follows from
the layouts (Megatron's f and g, the reduction of norm weights) is the business of propagation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compiler.diagnostics import Diagnostics, closest
from compiler.dsl.plan import Pattern, Plan
from compiler.ir.graph import Graph, Node, Value
from compiler.layout.factors import shard_for
from compiler.layout.placement import Layout, Shard
from compiler.layout.rule import Rule, rule_of

STYLES = ("column", "row", "vocab", "replicate")


@dataclass(frozen=True)
class Styled:
    """A parameter that a pattern of a style names."""

    value: Value
    style: str
    pattern: Pattern


def tensor_layouts(plan: Plan, graph: Graph) -> dict[str, Layout]:
    """Layouts by parameter name over the tensor axis. Raises PlanError for a pattern that fits nothing."""
    strategy = plan.tensor
    if strategy is None:
        return {}
    axes = [axis for axis in strategy.axes if plan.axis_size(axis) > 1]
    if not axes:
        return {}
    found = Diagnostics()
    users = graph.users()
    layouts: dict[str, Layout] = {}
    for item in styled(plan, graph, found):
        if item.style == "replicate" or item.value.name in layouts:
            continue
        ways = 1
        for axis in axes:
            ways *= plan.axis_size(axis)
        shards = [s for node in users.get(item.value, ()) if (s := cut(item.style, item.value, node, ways)) is not None]
        if shards:
            layouts[item.value.name] = Layout((axis, shards[0]) for axis in axes)
    found.raise_if_errors(plan.sources)
    return layouts


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


def cut(style: str, value: Value, node: Node, ways: int) -> Shard | None:
    """The cut of `value` that the style asks for where `node` uses it, or None if there is none (a bias of a row)."""
    rule = rule_of(node)
    for k, operand in enumerate(node.inputs):
        if operand is value:
            factor = style_factor(style, k, rule)
            if factor is not None:
                return shard_for(factor, rule.operands[k], rule, value.shape, ways)
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
