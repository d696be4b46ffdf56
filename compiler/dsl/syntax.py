"""The syntax tree of a plan: what was written, with the place of each part.

Nothing is evaluated here: `2 * heads` is a `Binary`, `on` is a `Name`, `25MB` is a `Number`
with a unit. `check` gives these their meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from compiler.diagnostics import Span

# --- values ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """`10_000`, `1e-3`, `25MB`. `raw` is the spelling: `1f1b` is a number with unit `f1b`."""

    value: int | float
    unit: str | None
    raw: str
    span: Span


@dataclass(frozen=True)
class String:
    """`"text"`, escapes resolved."""

    text: str
    span: Span


@dataclass(frozen=True)
class Name:
    """A word: a defined name, or one of an option's choices (`on`, `none`, `ring`)."""

    name: str
    span: Span


@dataclass(frozen=True)
class Unary:
    """`-value`."""

    operator: str
    operand: Value
    span: Span
    depth: int = 1


@dataclass(frozen=True)
class Binary:
    """`left + right` and the like."""

    operator: str
    left: Value
    right: Value
    span: Span
    depth: int = 1


@dataclass(frozen=True)
class ListValue:
    """`[a, b]`."""

    items: tuple[Value, ...]
    span: Span
    depth: int = 1


@dataclass(frozen=True)
class TupleValue:
    """`(a, b)`."""

    items: tuple[Value, ...]
    span: Span
    depth: int = 1


@dataclass(frozen=True)
class Call:
    """`fit(70GB)`."""

    function: Name
    arguments: tuple[Value, ...]
    span: Span
    depth: int = 1


Value = Number | String | Name | Unary | Binary | ListValue | TupleValue | Call


def children(value: Value) -> tuple[Value, ...]:
    """The values that `value` is made of."""
    match value:
        case Unary():
            return (value.operand,)
        case Binary():
            return (value.left, value.right)
        case ListValue() | TupleValue():
            return value.items
        case Call():
            return value.arguments
    return ()


def names_in(value: Value) -> Iterator[Name]:
    """Every `Name` inside `value`."""
    todo = [value]
    while todo:
        node = todo.pop()
        if isinstance(node, Name):
            yield node
        todo.extend(children(node))


# --- parts of statements ----------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """`name = value`, in a block or after `mesh` and `clip`."""

    name: Name
    value: Value
    span: Span


@dataclass(frozen=True)
class PatternItem:
    """`column "a", "b"` or `split before "a"`, in a block."""

    words: tuple[Name, ...]
    patterns: tuple[String, ...]
    span: Span


Item = Setting | PatternItem

# --- statements --------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """`batch = 32`."""

    name: Name
    value: Value
    span: Span


@dataclass(frozen=True)
class Include:
    """`include "base.plan"`."""

    path: String
    span: Span


@dataclass(frozen=True)
class Input:
    """`input tokens : int64[batch, seq]`, with `shared` or `batch dim 1` behind it."""

    name: Name
    dtype: Name
    dims: tuple[Value, ...]
    trait: tuple[Name, ...]
    batch_dim: Value | None
    span: Span


@dataclass(frozen=True)
class Statement:
    """Every other statement: its word, and those of these parts that its form has."""

    word: Name
    span: Span
    subject: String | Name | None = None
    axes: tuple[Name, ...] = ()
    patterns: tuple[String, ...] = ()
    value: Value | None = None
    items: tuple[Item, ...] = ()

    def setting(self, name: str) -> Setting | None:
        """The setting called `name`, if there is one."""
        for item in self.items:
            if isinstance(item, Setting) and item.name.name == name:
                return item
        return None


@dataclass(frozen=True)
class Broken:
    """A statement that could not be parsed: remembered so that nobody reports it missing."""

    word: str
    span: Span


AnyStatement = Definition | Include | Input | Statement | Broken


def values_in(statement: AnyStatement) -> Iterator[Value]:
    """Every value written in a statement."""
    match statement:
        case Definition():
            yield statement.value
        case Input():
            yield from statement.dims
            if statement.batch_dim is not None:
                yield statement.batch_dim
        case Statement():
            if statement.value is not None:
                yield statement.value
            for item in statement.items:
                if isinstance(item, Setting):
                    yield item.value


@dataclass(frozen=True)
class File:
    """One plan file: its normalised text and its statements in order."""

    file: str
    text: str
    statements: tuple[AnyStatement, ...] = field(default=())
