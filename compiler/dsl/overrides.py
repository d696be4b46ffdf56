"""`--set name=value`: values from the command line, put into the statements before checking.

A target is, in this order: a defined name (`batch`), a mesh axis (`dp`), a statement that is a
single choice (`mode`), or an option of a statement (`data.microbatches`). The overrides stand in
a source of their own, called `--set`, one per line, so that messages can show them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compiler.diagnostics import Diagnostics, Span, did_you_mean
from compiler.dsl import plan, syntax
from compiler.dsl.files import Program
from compiler.dsl.kinds import Maybe, Text
from compiler.dsl.options import options_of
from compiler.dsl.parser import parse_value
from compiler.dsl.schema import STATEMENTS

SOURCE = "--set"
Sets = Mapping[str, object] | Sequence[str]


@dataclass(frozen=True)
class Override:
    """One `target=text`, with its places in the source `--set`."""

    target: str
    text: str
    target_span: Span
    value_span: Span


def apply_sets(program: Program, sets: Sets, diagnostics: Diagnostics) -> None:
    """Put every override into `program`, or report why that is not possible."""
    given = (f"{k}={v}" for k, v in sets.items()) if isinstance(sets, Mapping) else sets
    lines = [" ".join(str(line).splitlines()) for line in given]
    if not lines:
        return
    program.sources[SOURCE] = "\n".join(lines)
    for number, line in enumerate(lines, start=1):
        override = _read(line, number, diagnostics)
        if override is not None:
            _Applier(program, override, diagnostics).apply()


def _read(line: str, number: int, diagnostics: Diagnostics) -> Override | None:
    target, equal, text = line.partition("=")
    middle = len(target) + 2
    whole = Span(SOURCE, number, 1, number, max(len(line), 1) + 1)
    if not equal or not target.strip() or not text.strip():
        diagnostics.error(
            "E053",
            "an override is written `name=value`",
            whole,
            help="for example `--set batch=64`",
        )
        return None
    return Override(
        target.strip(),
        text.strip(),
        Span(SOURCE, number, 1, number, middle - 1),
        Span(SOURCE, number, middle, number, len(line) + 1),
    )


class _Applier:
    """Finds what one override means."""

    def __init__(self, program: Program, override: Override, diagnostics: Diagnostics):
        self.program = program
        self.override = override
        self.diagnostics = diagnostics

    def apply(self) -> None:
        """Try the kinds of targets in order."""
        target = self.override.target
        done = self._option() if "." in target else self._name() or self._axis() or self._choice()
        if not done and not self.program.incomplete:
            self._unknown()

    def _name(self) -> bool:
        for at, statement in enumerate(self.program.statements):
            if isinstance(statement, syntax.Definition):
                if statement.name.name == self.override.target:
                    self._replace(at, replace(statement, value=self._value()))
                    return True
        return False

    def _axis(self) -> bool:
        return self._set_item("mesh", self.override.target, None, add=False)

    def _choice(self) -> bool:
        word = self.override.target
        kind = STATEMENTS.get(word)
        if kind is None or kind.choice is None:
            return False
        name = syntax.Name(word, self.override.target_span)
        statement = syntax.Statement(name, self.override.value_span, value=self._value())
        for at, old in enumerate(self.program.statements):
            if isinstance(old, syntax.Statement) and old.word.name == word:
                self._replace(at, statement)
                return True
        self.program.statements.append(statement)
        return True

    def _option(self) -> bool:
        word, _, option = self.override.target.partition(".")
        kind = STATEMENTS.get(word)
        if kind is None or not (kind.spec or kind.free_options) or kind.form in ("INPUT", "RULE"):
            return False
        known = _options(kind.spec, self._subject(word))
        wants_text = option in known and _is_text(known[option].kind)
        if self._set_item(word, option, wants_text, add=word != "mesh"):
            return True
        if word == "mesh":
            return False
        if kind.assumed or kind.merges:
            name = syntax.Name(word, self.override.target_span)
            item = self._setting(option, wants_text)
            self.program.statements.append(
                syntax.Statement(name, self.override.target_span, items=(item,))
            )
            return True
        if not self.program.broken(word):
            self.diagnostics.error(
                "E052",
                f"the plan has no `{word}` statement to set `{option}` of",
                self.override.target_span,
                help=f"add it to the plan: {kind.usage}",
            )
        return True

    def _set_item(self, word: str, option: str, wants_text: bool | None, add: bool) -> bool:
        """Replace (or add) one setting of the statement `word`; False if there is none."""
        last = None
        for at, statement in enumerate(self.program.statements):
            if not (isinstance(statement, syntax.Statement) and statement.word.name == word):
                continue
            last = at
            if statement.setting(option):
                setting = self._setting(option, wants_text)
                items = [
                    setting if isinstance(i, syntax.Setting) and i.name.name == option else i
                    for i in statement.items
                ]
                self._replace(at, replace(statement, items=tuple(items)))
                return True
        if last is None or not add:
            return False
        statement = self.program.statements[last]
        items = (*statement.items, self._setting(option, wants_text))
        self._replace(last, replace(statement, items=items))
        return True

    def _setting(self, option: str, wants_text: bool | None) -> syntax.Setting:
        span = self.override.target_span
        value = self._value(bool(wants_text))
        return syntax.Setting(syntax.Name(option, span), value, span.to(value.span))

    def _value(self, wants_text: bool = False) -> syntax.Value:
        """The value; what is not written as a value of the language is text (`runs/x`)."""
        text, span = self.override.text, self.override.value_span
        if not (wants_text and not text.startswith('"') and text != "none"):
            value = parse_value(text, SOURCE)
            if value is not None:
                return _moved(value, span)
        return syntax.String(text, span)

    def _replace(self, at: int, statement: syntax.AnyStatement) -> None:
        self.program.statements[at] = statement
        self.program.written.append(statement)

    def _subject(self, word: str) -> str:
        for statement in self.program.statements:
            if isinstance(statement, syntax.Statement) and statement.word.name == word:
                return getattr(statement.subject, "name", "")
        return ""

    def _unknown(self) -> None:
        target = self.override.target
        if self.program.broken(target.partition(".")[0]):
            return
        self.diagnostics.error(
            "E052",
            f"the plan has no `{target}` to set",
            self.override.target_span,
            label="neither a name, nor an axis, nor an option",
            help=did_you_mean(target, self._targets("." in target))
            or "define a name with `name = value`, or set an option with `statement.option`",
        )

    def _targets(self, dotted: bool) -> list[str]:
        targets: list[str] = []
        for statement in self.program.statements:
            if isinstance(statement, syntax.Definition):
                targets.append(statement.name.name)
            elif isinstance(statement, syntax.Statement):
                word = statement.word.name
                subject = getattr(statement.subject, "name", "")
                if word == "mesh":
                    targets += [i.name.name for i in statement.items]
                elif dotted and STATEMENTS[word].spec:
                    known = _options(STATEMENTS[word].spec, subject)
                    targets += [f"{word}.{option}" for option in known]
        if dotted:
            assumed = [k for k in STATEMENTS.values() if k.assumed and k.spec]
            targets += [f"{k.word}.{o}" for k in assumed for o in options_of(k.spec)]
        return targets


def _options(spec: type | None, subject: str) -> dict:
    own = options_of(spec) if spec else {}
    return options_of(plan.OPTIMIZERS[subject]) | own if subject in plan.OPTIMIZERS else own


def _is_text(kind: object) -> bool:
    return isinstance(kind, Text) or (isinstance(kind, Maybe) and isinstance(kind.kind, Text))


def _moved(value: syntax.Value, span: Span) -> syntax.Value:
    """`value` with all its places replaced by `span`."""
    changes: dict = {"span": span}
    match value:
        case syntax.Unary():
            changes["operand"] = _moved(value.operand, span)
        case syntax.Binary():
            changes |= {"left": _moved(value.left, span), "right": _moved(value.right, span)}
        case syntax.ListValue() | syntax.TupleValue():
            changes["items"] = tuple(_moved(i, span) for i in value.items)
        case syntax.Call():
            changes["arguments"] = tuple(_moved(a, span) for a in value.arguments)
    return replace(value, **changes)
