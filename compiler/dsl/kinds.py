"""The kinds of values that options take.

A kind converts a written value into a Python value, or raises a `Problem` that says what would
be right. `describe` is used in messages and in docs/language.md; `accepts` says whether a value
has the right shape, which is how `OneOf` chooses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from compiler.diagnostics import did_you_mean
from compiler.dsl import syntax
from compiler.dsl.names import LARGEST, WORDS, Environment, Problem, describe
from compiler.dsl.units import BYTES, EXAMPLES, FLOPS, NOUNS, RATE, SECONDS, show_size

_UNSHOWN = 10_000  # an upper bound from here on only guards against slips, and is not described
_ARITHMETIC = (syntax.Number, syntax.Name, syntax.Unary, syntax.Binary)


class Kind:
    """Base of all kinds."""

    def describe(self) -> str:
        """The kind in words: `a whole number ≥ 1`."""
        raise NotImplementedError

    def accepts(self, node: syntax.Value) -> bool:
        """Is `node` written as values of this kind are?"""
        raise NotImplementedError

    def convert(self, node: syntax.Value, names: Environment) -> object:
        """The value of `node`; raises `Problem`."""
        raise NotImplementedError

    def mismatch(self, node: syntax.Value, help: tuple[str, ...] = ()) -> Problem:
        """The problem that `node` is something else altogether."""
        return Problem(
            "E040", f"expected {self.describe()}, found {describe(node)}", node.span, help=help
        )


@dataclass(frozen=True)
class Quantitative(Kind):
    """A number of one dimension between bounds."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False
    dimension = ""
    whole = False

    def describe(self) -> str:
        noun = "a whole number" if self.whole and not self.dimension else NOUNS[self.dimension]
        noun = "a number" if noun == NOUNS[""] else noun
        if self.dimension:
            return f"{noun} (`{EXAMPLES[self.dimension]}`)"
        return f"{noun}{self._range()}"

    def _range(self) -> str:
        show = _show_number
        if self.low is not None and self.high is not None and self.high < _UNSHOWN:
            if self.whole and self.high - self.low <= 3:
                return ": " + ", ".join(str(n) for n in range(int(self.low), int(self.high) + 1))
            left, right = "[("[self.open_low], "])"[self.open_high]
            return f" in {left}{show(self.low)}, {show(self.high)}{right}"
        if self.low is not None:
            return f" {'>' if self.open_low else '≥'} {show(self.low)}"
        return ""

    def accepts(self, node: syntax.Value) -> bool:
        return isinstance(node, _ARITHMETIC) and not (
            isinstance(node, syntax.Name) and node.name in WORDS
        )

    def convert(self, node: syntax.Value, names: Environment) -> int | float:
        if not self.accepts(node):
            raise self.mismatch(node, self._unquoted(node))
        quantity = names.evaluate(node)
        if quantity.dimension != self.dimension:
            raise self._wrong_unit(node, quantity.value, quantity.dimension)
        value = quantity.value
        if self.whole and not isinstance(value, int):
            exact = int(value) if value.is_integer() and abs(value) < LARGEST else None
            found = f"`{node.raw}`" if isinstance(node, syntax.Number) else f"{value}"
            uses_slash = isinstance(node, syntax.Binary) and node.operator == "/"
            hint = "divide with `//`" if uses_slash else f"write `{exact}`"
            raise Problem(
                "E040",
                f"expected {self.describe()}, found {found}",
                node.span,
                help=(hint,) if exact is not None or uses_slash else (),
            )
        if not self._inside(value):
            shown = _show_number(value) if not self.dimension else "this"
            raise Problem(
                "E043", f"{shown} is out of range", node.span, label=self._bound(value)
            )
        return value if self.whole else float(value)

    def _inside(self, value: int | float) -> bool:
        low = self.low is None or (value > self.low if self.open_low else value >= self.low)
        high = self.high is None or (value < self.high if self.open_high else value <= self.high)
        return low and high

    def _bound(self, value: int | float) -> str:
        """What is wrong with a value outside the range."""
        if self.high is not None and value > self.high and self.high >= _UNSHOWN:
            return f"expected at most {_show_number(self.high)}"
        if self.dimension:
            return f"expected more than {_show_number(self.low)}"
        return f"expected {self.describe()}"

    def _unquoted(self, node: syntax.Value) -> tuple[str, ...]:
        if isinstance(node, syntax.String) and re.match(r"^[\d.]+\w*(/s)?$", node.text):
            return (f"write it without quotes: `{node.text}`",)
        return ()

    def _wrong_unit(self, node: syntax.Value, value: float, dimension: str) -> Problem:
        help: tuple[str, ...] = ()
        if not dimension:
            message = f"{NOUNS[self.dimension]} needs a unit"
            if isinstance(node, syntax.Number):
                unit = EXAMPLES[self.dimension].lstrip("0123456789")
                big = self.dimension == BYTES and value >= 1000
                help = (f"did you mean `{show_size(value) if big else node.raw + unit}`?",)
        elif not self.dimension:
            message = f"expected {self.describe()}, found {NOUNS[dimension]}"
            if isinstance(node, syntax.Number):
                help = (f"write the number without the unit `{node.unit}`",)
        else:
            message = f"expected {self.describe()}, found {NOUNS[dimension]}"
            if isinstance(node, syntax.Number) and node.unit and (dimension, self.dimension) in (
                (BYTES, RATE),
                (RATE, BYTES),
            ):
                other = node.raw[:-2] if dimension == RATE else node.raw + "/s"
                help = (f"did you mean `{other}`?",)
        return Problem("E041", message, node.span, help=help)


@dataclass(frozen=True)
class Whole(Quantitative):
    """A whole number."""

    whole = True


@dataclass(frozen=True)
class Real(Quantitative):
    """A number."""


@dataclass(frozen=True)
class Size(Quantitative):
    """A number of bytes."""

    low: float | None = 0
    open_low: bool = True
    dimension = BYTES
    whole = True


@dataclass(frozen=True)
class Rate(Quantitative):
    """Bytes per second."""

    low: float | None = 0
    open_low: bool = True
    dimension = RATE


@dataclass(frozen=True)
class Speed(Quantitative):
    """Operations per second."""

    low: float | None = 0
    open_low: bool = True
    dimension = FLOPS


@dataclass(frozen=True)
class Duration(Quantitative):
    """Seconds."""

    low: float | None = 0
    dimension = SECONDS


@dataclass(frozen=True)
class Switch(Kind):
    """`on` or `off`."""

    def describe(self) -> str:
        return "`on` or `off`"

    def accepts(self, node: syntax.Value) -> bool:
        return isinstance(node, syntax.Name) and WORDS.get(node.name) is not None

    def convert(self, node: syntax.Value, names: Environment) -> bool:
        if self.accepts(node):
            return WORDS[node.name]
        help: tuple[str, ...] = ()
        if isinstance(node, syntax.Name):
            help = did_you_mean(node.name, ("on", "off", "true", "false"))
        elif isinstance(node, syntax.Number) and node.raw in ("0", "1"):
            help = (f"did you mean `{'off' if node.raw == '0' else 'on'}`?",)
        raise self.mismatch(node, help)


class Choice(Kind):
    """One of a few words; an alias stands for its word."""

    def __init__(self, *words: str, aliases: dict[str, str] | None = None, noun: str = ""):
        self.words = words
        self.meaning = dict(zip(words, words, strict=True)) | (aliases or {})
        self.noun = noun

    def describe(self) -> str:
        return self.noun or " | ".join(f"`{w}`" for w in self.words)

    def accepts(self, node: syntax.Value) -> bool:
        return _spelling(node) in self.meaning

    def convert(self, node: syntax.Value, names: Environment) -> str:
        spelling = _spelling(node)
        if spelling in self.meaning:
            return self.meaning[spelling]
        if isinstance(node, syntax.String) and node.text in self.meaning:
            raise self.mismatch(node, (f"write it without quotes: `{node.text}`",))
        if spelling is None:
            raise self.mismatch(node)
        help = did_you_mean(spelling, self.meaning)
        listed = f"the choices are: {', '.join(f'`{w}`' for w in self.words)}"
        if help and help[0].startswith("did you mean") and len(self.words) <= 12:
            help = (*help, listed)
        raise Problem(
            "E044",
            f"`{spelling}` is not one of the choices here",
            node.span,
            label="unknown choice",
            help=help if len(help) == 2 else help or (listed,),
        )


@dataclass(frozen=True)
class Text(Kind):
    """A string in double quotes. `check` returns what is wrong with its content, if anything."""

    noun: str = "a string"
    check: Callable[[str], str | None] | None = None

    def describe(self) -> str:
        return f"{self.noun} in double quotes"

    def accepts(self, node: syntax.Value) -> bool:
        return isinstance(node, syntax.String)

    def convert(self, node: syntax.Value, names: Environment) -> str:
        if not isinstance(node, syntax.String):
            word = _spelling(node)
            raise self.mismatch(node, (f'write `"{word}"`',) if word else ())
        wrong = self.check(node.text) if self.check else None
        if wrong:
            raise Problem("E046", wrong, node.span, label=f"expected {self.noun}")
        return node.text


@dataclass(frozen=True)
class Several(Kind):
    """A tuple of `length` values of one kind."""

    kind: Kind
    length: int

    def describe(self) -> str:
        return f"{self.length} values `(a, b)`, each {self.kind.describe()}"

    def accepts(self, node: syntax.Value) -> bool:
        return isinstance(node, syntax.TupleValue | syntax.ListValue)

    def convert(self, node: syntax.Value, names: Environment) -> tuple:
        if not self.accepts(node):
            raise self.mismatch(node)
        if len(node.items) != self.length:
            found = f"{len(node.items)} value{'s' * (len(node.items) != 1)}"
            raise Problem("E040", f"expected {self.length} values, found {found}", node.span)
        return tuple(self.kind.convert(item, names) for item in node.items)


@dataclass(frozen=True)
class Maybe(Kind):
    """`none`, or a value of another kind."""

    kind: Kind

    def describe(self) -> str:
        return f"{self.kind.describe()}, or `none`"

    def accepts(self, node: syntax.Value) -> bool:
        return _spelling(node) == "none" or self.kind.accepts(node)

    def convert(self, node: syntax.Value, names: Environment) -> object:
        return None if _spelling(node) == "none" else self.kind.convert(node, names)


class OneOf(Kind):
    """A value of the first of several kinds that accepts it."""

    def __init__(self, *kinds: Kind):
        self.kinds = kinds

    def describe(self) -> str:
        return ", or ".join(k.describe() for k in self.kinds)

    def accepts(self, node: syntax.Value) -> bool:
        return any(k.accepts(node) for k in self.kinds)

    def convert(self, node: syntax.Value, names: Environment) -> object:
        for kind in self.kinds:
            if kind.accepts(node):
                return kind.convert(node, names)
        if _spelling(node) is not None:
            for kind in self.kinds:
                if isinstance(kind, Choice):
                    return kind.convert(node, names)
        raise self.mismatch(node)


@dataclass(frozen=True)
class Anything(Kind):
    """What a model takes: numbers, strings, switches, `none`, lists and tuples of them."""

    def describe(self) -> str:
        return "any value"

    def accepts(self, node: syntax.Value) -> bool:
        return True

    def convert(self, node: syntax.Value, names: Environment) -> object:
        match node:
            case syntax.String():
                return node.text
            case syntax.ListValue():
                return [self.convert(i, names) for i in node.items]
            case syntax.TupleValue():
                return tuple(self.convert(i, names) for i in node.items)
            case syntax.Call():
                raise self.mismatch(node)
            case syntax.Name() if node.name in WORDS:
                return WORDS[node.name]
        return names.evaluate(node).value


def _spelling(node: syntax.Value) -> str | None:
    """`node` as a bare word, if it is one: a name, or a number such as `1f1b`."""
    match node:
        case syntax.Name():
            return node.name
        case syntax.Number():
            return node.raw
    return None


def _show_number(number: float) -> str:
    return f"{number:_}" if isinstance(number, int) else f"{number:g}"
