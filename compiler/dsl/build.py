"""The parser's raw tree to the typed nodes of syntax.py."""

from __future__ import annotations

import re

from lark import Token, Tree
from lark.visitors import Transformer_NonRecursive, v_args

from compiler.diagnostics import Span
from compiler.dsl import syntax
from compiler.dsl.lexer import ESCAPES, span_of
from compiler.dsl.schema import STATEMENTS

_NUMBER = re.compile(r"(?P<number>[0-9_]*\.?[0-9_]*(?:[eE][+-]?[0-9_]+)?)(?P<unit>.*)", re.DOTALL)


@v_args(meta=True)
class Build(Transformer_NonRecursive):
    """One method for each rule of the grammar. `items` is the content of the statement's block."""

    def __init__(self, file: str, items: tuple[syntax.Item, ...]):
        super().__init__(visit_tokens=False)
        self.file = file
        self.items = items

    # --- statements (each returns a list: `clip a = 1 b = 2` is two) ---

    def definition(self, meta, parts):
        name, value = parts
        return [syntax.Definition(self._name(name), value, self._span(meta))]

    def include(self, meta, parts):
        return [syntax.Include(self._string(parts[1]), self._span(meta))]

    def input(self, meta, parts):
        _, name, dtype, dims, trait = parts
        words, batch_dim = trait or ((), None)
        return [
            syntax.Input(
                self._name(name),
                self._name(dtype),
                dims or (),
                words,
                batch_dim,
                self._span(meta),
            )
        ]

    def trait(self, meta, parts):
        words = tuple(self._name(p) for p in parts if isinstance(p, Token))
        return words, parts[2] if len(parts) > 2 else None

    def with_subject(self, meta, parts):
        word, subject, _ = parts
        node = self._string(subject) if subject.type == "STRING" else self._name(subject)
        return [self._statement(meta, word, subject=node)]

    def strategy(self, meta, parts):
        word, _, *axes = parts
        names = tuple(self._name(a) for a in axes if a is not None and a.type == "NAME")
        return [self._statement(meta, word, axes=names)]

    def section(self, meta, parts):
        return [self._statement(meta, parts[0])]

    def pairs(self, meta, parts):
        settings = tuple(p for p in parts[1:] if isinstance(p, syntax.Setting))
        word = self._name(parts[0])
        groups = [(s,) for s in settings] if STATEMENTS[word.name].merges else [settings]
        return [syntax.Statement(word, self._span(meta), items=group) for group in groups]

    def patterns(self, meta, parts):
        return [self._statement(meta, parts[0], patterns=parts[1])]

    def rule(self, meta, parts):
        word, patterns, value = parts
        return [self._statement(meta, word, patterns=patterns, value=value)]

    def choice(self, meta, parts):
        return [self._statement(meta, parts[0], value=parts[1])]

    # --- items ---

    def setting(self, meta, parts):
        name, value = parts
        return syntax.Setting(self._name(name), value, self._span(meta))

    def pattern_item(self, meta, parts):
        *words, patterns = parts
        names = tuple(self._name(w) for w in words if w is not None)
        return syntax.PatternItem(names, patterns, self._span(meta))

    def item(self, meta, parts):
        return parts[0]

    def strings(self, meta, parts):
        return tuple(self._string(p) for p in parts)

    def values(self, meta, parts):
        return tuple(p for p in parts if p is not None)

    # --- values ---

    def number(self, meta, parts):
        token = parts[0]
        found = _NUMBER.match(token)
        number, unit = found["number"], found["unit"] or None
        return syntax.Number(_numeral(number), unit, str(token), self._span(meta))

    def string(self, meta, parts):
        return self._string(parts[0])

    def name(self, meta, parts):
        return self._name(parts[0])

    def call(self, meta, parts):
        name, arguments = parts
        arguments = arguments or ()
        depth = _depth(*arguments)
        return syntax.Call(self._name(name), arguments, self._span(meta), depth)

    def group(self, meta, parts):
        return parts[0]

    def unary(self, meta, parts):
        operator, operand = parts
        return syntax.Unary(str(operator), operand, self._span(meta), _depth(operand))

    def binary(self, meta, parts):
        left, operator, right = parts
        depth = _depth(left, right)
        return syntax.Binary(str(operator), left, right, self._span(meta), depth)

    def tuple(self, meta, parts):
        first = parts[:1]
        rest = parts[1] if len(parts) > 1 and parts[1] else ()
        items = (*first, *rest)
        return syntax.TupleValue(items, self._span(meta), _depth(*items))

    def list(self, meta, parts):
        items = parts[0] or ()
        return syntax.ListValue(items, self._span(meta), _depth(*items))

    # --- help ---

    def _statement(self, meta, word: Token, **parts) -> syntax.Statement:
        return syntax.Statement(self._name(word), self._span(meta), items=self.items, **parts)

    def _name(self, token: Token) -> syntax.Name:
        return syntax.Name(str(token), span_of(token, self.file))

    def _string(self, token: Token) -> syntax.String:
        text = re.sub(r"\\(.)", lambda m: ESCAPES.get(m[1], m[0]), str(token)[1:-1])
        return syntax.String(text, span_of(token, self.file))

    def _span(self, meta: Tree) -> Span:
        return Span(self.file, meta.line, meta.column, meta.end_line, meta.end_column)


def _depth(*values: syntax.Value) -> int:
    return 1 + max((getattr(v, "depth", 0) for v in values), default=0)


def _numeral(text: str) -> int | float | None:
    """The number that `text` spells, or None if it is malformed or beyond all use."""
    digits = text.replace("_", "")
    if text.endswith("_") or "__" in text or "_." in text or "._" in text or len(digits) > 60:
        return None
    if digits.isdigit():
        return int(digits)
    number = float(digits)
    return number if number not in (float("inf"),) else None
