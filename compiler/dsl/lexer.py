"""Text to tokens, for any text at all.

What is no token is reported, and stays as an UNKNOWN token: the parser gives up on the statement
or item that holds one without a second report.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from lark import Lark, Token

from compiler.diagnostics import Diagnostics, Span

ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}


@lru_cache(maxsize=1)
def grammar() -> Lark:
    """The compiled grammar.lark."""
    text = (Path(__file__).parent / "grammar.lark").read_text("utf-8")
    return Lark(
        text,
        parser="lalr",
        lexer="basic",
        start=["statement", "item", "value", "token"],
        propagate_positions=True,
        maybe_placeholders=True,
    )


def normalise(text: str) -> str:
    """`text` without a byte order mark and with `\\n` line ends."""
    return text.lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def span_of(token: Token, file: str) -> Span:
    """The place of a token."""
    return Span(file, token.line, token.column, token.end_line, token.end_column)


def lex(text: str, file: str, diagnostics: Diagnostics) -> list[Token]:
    """All tokens of a normalised text, comments and line ends included."""
    tokens: list[Token] = []
    for token in grammar().lex(text):
        if token.type == "UNKNOWN":
            _unknown(token, file, diagnostics)
            # A semicolon was meant to end something, so let it; else the parser gives up there.
            tokens.append(token.update(type="NEWLINE") if token == ";" else token)
        elif token.type == "UNCLOSED_STRING":
            diagnostics.error(
                "E011",
                "this string is never closed",
                span_of(token, file),
                label="a string ends on its own line",
                help='add the closing `"`',
            )
            text_so_far = str(token).rstrip().rstrip("\\")
            tokens.append(token.update(type="STRING", value=text_so_far + '"'))
        elif token.type == "SINGLE_QUOTED":
            diagnostics.error(
                "E012",
                "a string is written in double quotes",
                span_of(token, file),
                help=f'write `"{token[1:-1]}"`',
            )
            tokens.append(token.update(type="STRING", value='"' + token[1:-1] + '"'))
        else:
            if token.type == "STRING":
                token = _check_escapes(token, file, diagnostics)
            tokens.append(token)
    return tokens


def _check_escapes(token: Token, file: str, diagnostics: Diagnostics) -> Token:
    """The string, without the escapes that there are not."""
    for escape in re.finditer(r"\\(.)", str(token)):
        if escape[1] not in ESCAPES:
            column = token.column + escape.start()
            diagnostics.error(
                "E012",
                f"`{escape[0]}` is no escape",
                Span(file, token.line, column, token.line, column + 2),
                help='in a string there are `\\n`, `\\t`, `\\"` and `\\\\`; a backslash is `\\\\`',
            )
            token = token.update(value=token.replace(escape[0], "", 1))
    return token


_HINTS = {
    ";": "a statement ends at the end of its line",
    ".": "a dotted name is written as a string, in double quotes",
    "'": "a string is written in double quotes",
    "<": "there are no comparisons in a plan",
    ">": "there are no comparisons in a plan",
    "“": 'use the plain double quote `"`',
    "”": 'use the plain double quote `"`',
    "×": "multiplication is written `*`",
    "÷": "division is written `/`, or `//` for whole numbers",
    "−": "the minus sign is `-`",
    "|": "choose one of the words",
    "@": "a comment begins with `#`",
    "!": "a comment begins with `#`",
}


def _unknown(token: Token, file: str, diagnostics: Diagnostics) -> None:
    """Report a stray character, once for each run of equal neighbours."""
    char = str(token)
    shown = f"`{char}`" if char.isprintable() else f"U+{ord(char):04X}"
    span = span_of(token, file)
    last = diagnostics.items[-1] if diagnostics.items else None
    if last and last.code == "E010" and last.span and last.span.end_line == span.line:
        if last.span.end_column == span.column:
            diagnostics.items.pop()
            diagnostics.error(
                "E010", last.message, last.span.to(span), label=last.label, help=last.help
            )
            return
    hint = _HINTS.get(char, ())
    if char == "\0":
        hint = "this does not look like a text file"
    diagnostics.error("E010", f"the character {shown} has no meaning here", span, help=hint)
