"""The options of one statement: each item gets its value, or a diagnostic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compiler.diagnostics import Diagnostics, Label, Span, did_you_mean
from compiler.dsl import plan, syntax
from compiler.dsl.kinds import Kind
from compiler.dsl.names import Environment, Problem
from compiler.dsl.options import Option, options_of, patterns_of
from compiler.dsl.schema import STATEMENTS
from compiler.dsl.strings import wrong_pattern


@dataclass
class Options:
    """The options of one statement, converted, and where each was written."""

    values: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Span] = field(default_factory=dict)


class Converter:
    """Converts the items of statements by the declarations in plan.py."""

    def __init__(self, names: Environment, diagnostics: Diagnostics):
        self.names = names
        self.diagnostics = diagnostics

    def build(self, cls: type, statement: syntax.Statement, **more: Any) -> Any:
        """An instance of `cls` from the items of `statement`."""
        found = self.options(statement, options_of(cls), cls)
        return cls(**found.values, **more, given=found.given, span=statement.span)

    def options(
        self,
        statement: syntax.Statement,
        known: Mapping[str, Option],
        cls: type | None = None,
        free: Kind | None = None,
    ) -> Options:
        """The converted items of a statement; `free` is the kind of options not in `known`."""
        found = Options()
        words = {p.words: name for name, p in (patterns_of(cls) if cls else {}).items()}
        for item in statement.items:
            if isinstance(item, syntax.PatternItem):
                self._pattern_item(statement, item, words, known, found)
                continue
            name = item.name.name
            kind = known[name].kind if name in known else free
            if kind is None:
                self._unknown_option(statement, item.name, known, words)
                continue
            if name in found.given:
                self.twice(f"`{name}`", item.name.span, found.given[name])
            found.given[name] = item.name.span
            try:
                found.values[name] = kind.convert(item.value, self.names)
            except Problem as problem:
                problem.report(self.diagnostics)
        return found

    def _pattern_item(
        self,
        statement: syntax.Statement,
        item: syntax.PatternItem,
        words: Mapping[tuple[str, ...], str],
        known: Mapping[str, Option],
        found: Options,
    ) -> None:
        spelled = tuple(w.name for w in item.words)
        name = words.get(spelled)
        if name is not None:
            earlier = found.values.get(name, ())
            found.values[name] = (*earlier, *self.patterns(item.patterns, earlier))
            found.given.setdefault(name, item.words[0].span)
        elif item.words[0].name in known and not any(spelled[0] == w[0] for w in words):
            self.diagnostics.error(
                "E020",
                f"`=` is missing after `{item.words[0].name}`",
                item.words[0].span.end(),
                label="expected `=`",
            )
        else:
            best = next((" ".join(w) for w in words if w[0] == spelled[0]), None)
            span = item.words[0].span.to(item.words[-1].span)
            shown = syntax.Name(" ".join(spelled), span)
            self._unknown_option(statement, shown, known, words, best)

    def _unknown_option(
        self,
        statement: syntax.Statement,
        name: syntax.Name,
        known: Mapping[str, Option],
        words: Mapping[tuple[str, ...], str],
        best: str | None = None,
    ) -> None:
        word = statement.word.name
        title = f"{word} {getattr(statement.subject, 'name', '')}".rstrip()
        spelled = [*known, *(" ".join(w) for w in words)]
        help = (f"did you mean `{best}`?",) if best else did_you_mean(name.name, spelled)
        if (name.name,) in words and not best:
            help = (f'it is written `{name.name} "pattern"`, without `=`',)
        elsewhere = [
            f"`{k.word}`"
            for k in STATEMENTS.values()
            if k.word != word and k.spec and name.name in options_of(k.spec)
        ]
        elsewhere += [
            f"`optimizer {other}`"
            for other, cls in plan.OPTIMIZERS.items()
            if name.name in options_of(cls) and title != f"optimizer {other}"
        ]
        notes = f"`{name.name}` is an option of {' and '.join(elsewhere)}" if elsewhere else ()
        self.diagnostics.error(
            "E032",
            f"`{title}` has no {'patterns' if best else 'option'} `{name.name}`",
            name.span,
            label=f"not an option of `{title}`",
            notes=notes,
            help=help,
        )

    def patterns(
        self, strings: tuple[syntax.String, ...], earlier: tuple[plan.Pattern, ...] = ()
    ) -> tuple[plan.Pattern, ...]:
        found: list[plan.Pattern] = []
        for string in strings:
            if wrong := wrong_pattern(string.text):
                self.diagnostics.error("E046", wrong, string.span, label="not a pattern")
                continue
            same = [p for p in (*earlier, *found) if p.text == string.text]
            if same:
                self.twice("this pattern", string.span, same[0].span)
            found.append(plan.Pattern(string.text, string.span))
        return tuple(found)

    def value(self, kind: Kind, node: syntax.Value) -> Any:
        """The value of `node`, or None and a diagnostic."""
        try:
            return kind.convert(node, self.names)
        except Problem as problem:
            problem.report(self.diagnostics)
            return None

    def twice(self, what: str, span: Span, first: Span) -> None:
        self.diagnostics.error(
            "E030",
            f"{what} is given twice",
            span,
            label="given again here",
            related=[Label(first, "first given here")],
        )
