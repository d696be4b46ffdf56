"""Tokens to token trees: brackets matched, statements and items cut apart.

This is where errors are contained. A missing or extra bracket is reported and mended here, and
each statement (and each item of a `{ … }`) is a list of tokens of its own, so that a mistake in
one cannot spoil the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lark import Token

from compiler.diagnostics import Diagnostics, Label
from compiler.dsl.lexer import span_of

MAX_DEPTH = 60
_CLOSER = {"LBRACE": "RBRACE", "LPAR": "RPAR", "LSQB": "RSQB"}
_OPENER = {closer: opener for opener, closer in _CLOSER.items()}


@dataclass
class Block:
    """`{ … }`: its brackets and its items, each a list of tokens."""

    open: Token
    close: Token | None
    items: list[Chunk] = field(default_factory=list)


Chunk = list[Token | Block]


def split(tokens: list[Token], file: str, diagnostics: Diagnostics) -> list[Chunk]:
    """The statements of a file, in order."""
    code = [t for t in tokens if t.type != "COMMENT"]
    mended = _balance(code, file, diagnostics)
    single = [t for i, t in enumerate(mended) if i == 0 or not _is_blank(mended[i - 1], t)]
    chunks, _ = _read(single, 0, inside=None)
    return chunks


def _is_blank(before: Token, token: Token) -> bool:
    return before.type == token.type == "NEWLINE"


def _balance(tokens: list[Token], file: str, diagnostics: Diagnostics) -> list[Token]:
    """The tokens with brackets that match; every mend is reported.

    An opening bracket that the file never closes ends where its statement visibly ends: before
    the next line that is indented no deeper than the statement's first line.
    """
    unclosed = _unclosed(tokens)
    out: list[Token] = []
    stack: list[tuple[Token, int]] = []  # an opening bracket, and its line's indentation
    indent, at_line_start, too_deep = 1, True, 0

    def close(reason: Token | None) -> None:
        opener, _ = stack.pop()
        related = [Label(span_of(reason, file), "the next statement begins")] if reason else []
        diagnostics.error(
            "E014",
            f"this `{opener}` is never closed",
            span_of(opener, file),
            related=related,
            help=f"add `{_SHAPE[_CLOSER[opener.type]]}`",
        )
        out.append(Token.new_borrow_pos(_CLOSER[opener.type], _SHAPE[_CLOSER[opener.type]], opener))

    for token in tokens:
        if token.type == "NEWLINE":
            at_line_start = True
            out.append(token)
            continue
        if at_line_start:
            at_line_start = False
            if token.type not in _OPENER:
                while stack and id(stack[-1][0]) in unclosed and token.column <= stack[-1][1]:
                    newlines = _pop_newlines(out)
                    close(token)
                    out += newlines
            indent = token.column
        if token.type in _CLOSER:
            if len(stack) >= MAX_DEPTH:
                if not too_deep:
                    diagnostics.error(
                        "E016",
                        f"brackets are nested more than {MAX_DEPTH} deep",
                        span_of(token, file),
                    )
                too_deep += 1
                continue
            stack.append((token, stack[-1][1] if stack and _same_line(stack, token) else indent))
        elif token.type in _OPENER:
            if too_deep:
                too_deep -= 1
                continue
            while stack and stack[-1][0].type != _OPENER[token.type]:
                if not any(o.type == _OPENER[token.type] for o, _ in stack):
                    break
                close(None)
            if not stack or stack[-1][0].type != _OPENER[token.type]:
                diagnostics.error(
                    "E015",
                    f"`{token}` closes nothing",
                    span_of(token, file),
                    label="no opening bracket before it",
                )
                continue
            stack.pop()
        out.append(token)
    while stack:
        newlines = _pop_newlines(out)
        close(None)
        out += newlines
    return out


_SHAPE = {"RBRACE": "}", "RPAR": ")", "RSQB": "]"}


def _same_line(stack: list[tuple[Token, int]], token: Token) -> bool:
    return stack[-1][0].line == token.line


def _pop_newlines(out: list[Token]) -> list[Token]:
    newlines = []
    while out and out[-1].type == "NEWLINE":
        newlines.append(out.pop())
    return newlines


def _unclosed(tokens: list[Token]) -> set[int]:
    """The opening brackets without a partner, when each closer takes the nearest of its kind."""
    stack: list[Token] = []
    lost: set[int] = set()
    for token in tokens:
        if token.type in _CLOSER:
            stack.append(token)
        elif token.type in _OPENER:
            wanted = _OPENER[token.type]
            if any(t.type == wanted for t in stack):
                while stack[-1].type != wanted:
                    lost.add(id(stack.pop()))
                stack.pop()
    return lost | {id(t) for t in stack}


def _read(tokens: list[Token], at: int, inside: Token | None) -> tuple[list[Chunk], int]:
    """Cut tokens into chunks up to the bracket that closes `inside` (or the end)."""
    chunks: list[Chunk] = []
    chunk: Chunk = []
    depth = 0  # of ( and [, inside which line ends and commas are ordinary

    def cut() -> None:
        nonlocal chunk
        if chunk:
            chunks.append(chunk)
        chunk = []

    while at < len(tokens):
        token = tokens[at]
        following = _next_code(tokens, at + 1)
        if token.type == "RBRACE" and depth == 0:
            if inside is not None:
                break
        elif token.type == "LBRACE":
            items, end = _read(tokens, at + 1, inside=token)
            chunk.append(Block(token, tokens[end] if end < len(tokens) else None, items))
            at = end
        elif token.type == "NEWLINE":
            if depth == 0 and not _continues(chunk, following):
                cut()
        elif token.type == "COMMA" and depth == 0 and inside and not _is(following, "STRING"):
            if chunk:
                cut()
            else:
                chunk.append(token)
        else:
            depth += (token.type in ("LPAR", "LSQB")) - (token.type in ("RPAR", "RSQB"))
            chunk.append(token)
        at += 1
    cut()
    return chunks, at


def _continues(chunk: Chunk, following: Token | None) -> bool:
    """Does the next line go on with this chunk: a `{`, or a string after a comma?"""
    if not chunk or following is None:
        return False
    last = chunk[-1]
    after_comma = isinstance(last, Token) and last.type == "COMMA"
    opens = following.type == "LBRACE" and not isinstance(last, Block)
    return opens or (after_comma and following.type == "STRING")


def _next_code(tokens: list[Token], at: int) -> Token | None:
    while at < len(tokens) and tokens[at].type == "NEWLINE":
        at += 1
    return tokens[at] if at < len(tokens) else None


def _is(token: Token | None, kind: str) -> bool:
    return token is not None and token.type == kind
