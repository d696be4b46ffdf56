"""Why a value is communicated inside a segment, told from the graph with layouts.

Nothing is recorded for this while compiling. A redistribution stands between the operator that leaves a value in one
layout and those that need it in another; what a backward communicates is the transpose of what the forward does
(`compiler.layout.redistribute`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from compiler.ir.graph import Graph, Node, Origin, Value
from compiler.ir.text import format_type
from compiler.layout.factors import cut_factors
from compiler.layout.placement import Layout, Mesh, Partial, Placement, Shard, transpose
from compiler.layout.rule import Rule, rule_of

MOVES = frozenset(
    f"planc.{name}"
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shard", "vary", "first", "alias")
)
"""Redistributions: nodes that change a layout and nothing else."""


@dataclass(frozen=True)
class Story:
    """`value` with its type before, and its layout after; `path` are the steps from the layout that its maker leaves to
    the one that its readers need; `reasons` are sentences. `involved`: the value and the graph's inputs that have a
    part in it, parameters above all."""

    origin: Origin
    value: str
    after: str
    path: tuple[str, ...]
    reasons: tuple[str, ...]
    involved: tuple[Value, ...] = ()


class StoryTeller:
    """Tells about the nodes of one segment's graph."""

    def __init__(self, graph: Graph, mesh: Mesh):
        self.mesh, self.users = mesh, graph.users()

    def tell(self, node: Node, axes: tuple[str, ...], backward: bool) -> Story:
        """About a node of the graph that communicates over `axes`, or whose transpose does in the backward."""
        if node.op not in MOVES:
            return self.own(node, axes, backward)
        chain = self.chain(node)
        before, after = node.args[0], node.outputs[0]
        assert after is not None
        last = chain[-1].outputs[0]
        assert last is not None
        readers = list(dict.fromkeys(self.readers(last)))
        reasons = [reason for axis in axes for reason in self.maker_says(before, axis)]
        reasons += [reason for axis in axes for reason in self.readers_say(readers, after, axis)]
        if backward:
            gradients = [Layout((a, transpose(p)) for a, p in (v.layout or {}).items()) for v in (after, before)]
            reasons.insert(
                0, f"backward: the gradient goes from {gradients[0]} to {gradients[1]}, as {short(node)} did"
            )
        makers = [maker for axis in axes if (maker := self.term_maker(before, axis)) is not None]
        involved = [value for n in (*makers, *readers) for value in n.inputs if value.kind]
        path = tuple(
            f"{step.args[0].layout} → {out.layout}: {short(step)}" for step in chain if (out := step.outputs[0])
        )
        value = f"%{before.name} : {format_type(before)}"
        return Story(
            node.origin, value, str(after.layout), path, tuple(dict.fromkeys(reasons)), (before, after, *involved)
        )

    def own(self, node: Node, axes: tuple[str, ...], backward: bool) -> Story:
        """An operator that communicates by itself."""
        rule = rule_of(node)
        value = next((v for v in node.inputs if any(isinstance((v.layout or Layout())[a], Shard) for a in axes)), None)
        value = value or node.inputs[0]
        factors = {axis: f for axis in axes for f in self.cut_over(node, rule, axis) if f in rule.collective}
        what = (
            " and ".join(f"`{factor}`, cut over {axis}" for axis, factor in factors.items()) or "what the ranks share"
        )
        when = ", in its backward too" if backward else ""
        reason = f"{called(node)} itself combines {what}{when} ({rule_text(rule)})"
        text = f"%{value.name} : {format_type(value)}"
        after = ", ".join(str(out.layout) for out in node.outputs if out is not None)
        return Story(node.origin, text, after, (), (reason,), tuple(node.inputs))

    # -- the neighbourhood ---------------------------------------------------------------------------------------

    def chain(self, node: Node) -> list[Node]:
        """The redistributions that the value goes through, this one among them."""
        steps = [node]
        while (maker := steps[0].args[0].producer) is not None and maker.op in MOVES:
            steps.insert(0, maker)
        while (out := steps[-1].outputs[0]) is not None and len(users := self.users.get(out, [])) == 1:
            if users[0].op not in MOVES:
                break
            steps.append(users[0])
        return steps

    def readers(self, value: Value) -> Iterator[Node]:
        """The operators that read a value, views and further redistributions skipped."""
        for node in self.users.get(value, []):
            passes = node.op in MOVES or rule_of(node).cheap
            if passes and node.outputs[0] is not None and self.users.get(node.outputs[0]):
                yield from self.readers(node.outputs[0])
            else:
                yield node

    def term_maker(self, value: Value, axis: str) -> Node | None:
        """The operator that makes each rank's value a term over the axis: the first, if others hand terms on."""
        node = value.producer if isinstance((value.layout or Layout())[axis], Partial) else None
        while node is not None:
            terms = [v for v in node.inputs if isinstance((v.layout or Layout())[axis], Partial)]
            if not terms or terms[0].producer is None:
                return node
            node = terms[0].producer
        return None

    def cut_over(self, node: Node, rule: Rule, axis: str) -> list[str]:
        """The factors of an operator that the axis cuts."""
        found = [
            cut_factors(value.layout or Layout(), dims, rule, value.shape, self.mesh).get(axis)
            for value, dims in zip(node.inputs, rule.operands)
        ]
        return list(dict.fromkeys(factor for factor in found if factor is not None))

    # -- sentences -----------------------------------------------------------------------------------------------

    def maker_says(self, value: Value, axis: str) -> Iterator[str]:
        maker = self.term_maker(value, axis)
        if maker is None:
            return
        rule = rule_of(maker)
        factors = " and ".join(f"`{factor}`" for factor in self.cut_over(maker, rule, axis))
        why = f"{axis} cuts {factors}, which it sums over" if factors else f"adds up what {axis} cuts"
        yield f"{called(maker)}: {why}, so every rank has a term ({rule_text(rule)})"

    def readers_say(self, readers: list[Node], value: Value, axis: str) -> Iterator[str]:
        """A sentence for all readers of which the same is to be said."""
        said: dict[str, list[Node]] = {}
        for reader in readers:
            said.setdefault(self.need(reader, (value.layout or Layout())[axis], axis), []).append(reader)
        for sentence, of in said.items():
            yield f"{', '.join(dict.fromkeys(map(called, of)))}: {sentence}"

    def need(self, reader: Node, place: Placement, axis: str) -> str:
        """What a reader does with an operand that is to be at `place`."""
        rule = rule_of(reader)
        factors = " and ".join(f"`{factor}`" for factor in self.cut_over(reader, rule, axis))
        if rule.fallback:
            return "no rule, so it works on whole values"
        if isinstance(place, Shard):
            return f"works on a part over {axis} ({rule_text(rule)})"
        if isinstance(place, Partial):
            return f"adds terms over {axis}"
        if factors:
            return f"{axis} cuts {factors}, and this operand is needed whole ({rule_text(rule)})"
        return f"needs it whole over {axis} ({rule_text(rule)})"


def short(node: Node) -> str:
    return node.op.removeprefix("planc.")


def called(node: Node) -> str:
    """ "`aten.linear` (layers.*.attn.wq)"."""
    module = f" ({node.origin.module})" if node.origin.module else ""
    return f"`{node.op.removesuffix('.default')}`{module}"


def rule_text(rule: Rule) -> str:
    """The factors as rules write them: "... k, n k -> ... n"."""
    operands = ", ".join(dims_text(dims) for dims in rule.operands)
    return f"{operands} -> {', '.join(dims_text(dims) for dims in rule.results if dims is not None)}"


def dims_text(dims: tuple[tuple[str, ...], ...]) -> str:
    words: list[str] = []
    for names in dims:
        word = names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1"
        word = "..." if word.startswith(".") and word[1:].isdigit() else word
        if word != "..." or words[-1:] != ["..."]:
            words.append(word)
    return " ".join(words) or "scalar"
