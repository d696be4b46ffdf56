"""How the classes of plan.py declare the options of the language.

One declaration, a field made with `option` or `patterns`, drives the checking, the defaults, the
suggestions and the tables of docs/language.md.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields

from compiler.dsl.kinds import Kind


@dataclass(frozen=True)
class Option:
    """How an option is written: the kind of its value, and what it is for."""

    kind: Kind
    doc: str


@dataclass(frozen=True)
class PatternOption:
    """A word (or two) that strings follow: `column "a", "b"`, `split before "a"`."""

    words: tuple[str, ...]
    doc: str


def option(kind: Kind, default: object, doc: str):
    """A field that a plan may set with `name = value`."""
    return field(default=default, metadata={"option": Option(kind, doc)})


def patterns(words: str, doc: str):
    """A field that a plan fills with `words "pattern", …`."""
    return field(default=(), metadata={"patterns": PatternOption(tuple(words.split()), doc)})


def options_of(cls: type) -> dict[str, Option]:
    """The options of a class below, by name."""
    return {f.name: f.metadata["option"] for f in fields(cls) if "option" in f.metadata}


def patterns_of(cls: type) -> dict[str, PatternOption]:
    """The pattern words of a class below, by field name."""
    return {f.name: f.metadata["patterns"] for f in fields(cls) if "patterns" in f.metadata}


def default_of(cls: type, name: str) -> object:
    """The default of a field."""
    found = next(f for f in fields(cls) if f.name == name)
    if found.default_factory is not MISSING:
        return found.default_factory()
    return None if found.default is MISSING else found.default
