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
    """The tokens with brackets that match; every mend is reported."""
    mender = _Mender(file, diagnostics, _unclosed(tokens))
    for token in tokens:
        mender.take(token)
    return mender.finish()


_SHAPE = {"RBRACE": "}", "RPAR": ")", "RSQB": "]"}


@dataclass
class _Mender:
    """Adds the closing brackets that are missing and leaves out those that are too many.

    A bracket that the file never closes (`unclosed`) ends where its statement visibly ends: before
    the next line that is indented no deeper than the line of the bracket.
    """

    file: str
    diagnostics: Diagnostics
    unclosed: set[int]
    out: list[Token] = field(default_factory=list)
    open: list[tuple[Token, int]] = field(default_factory=list)  # and its line's indentation
    indent: int = 1
    at_line_start: bool = True
    too_deep: int = 0

    def take(self, token: Token) -> None:
        """Add one token, after the closing brackets that must come before it."""
        if token.type == "NEWLINE":
            self.at_line_start = True
        elif self.at_line_start:
            self.at_line_start = False
            self.indent = token.column
            if token.type not in _OPENER:
                self._end_unclosed(token)
        if token.type in _CLOSER:
            keep = self._opening(token)
        elif token.type in _OPENER:
            keep = self._closing(token)
        else:
            keep = True
        if keep:
            self.out.append(token)

    def finish(self) -> list[Token]:
        """All tokens, with everything closed."""
        while self.open:
            self._close(None)
        return self.out

    def _end_unclosed(self, token: Token) -> None:
        while self.open:
            opener, indent = self.open[-1]
            if id(opener) not in self.unclosed or token.column > indent:
                return
            self._close(token)

    def _opening(self, token: Token) -> bool:
        if len(self.open) < MAX_DEPTH:
            self.open.append((token, self.indent))
            return True
        if not self.too_deep:
            message = f"brackets are nested more than {MAX_DEPTH} deep"
            self.diagnostics.error("E016", message, span_of(token, self.file))
        self.too_deep += 1
        return False

    def _closing(self, token: Token) -> bool:
        if self.too_deep:
            self.too_deep -= 1
            return False
        wanted = _OPENER[token.type]
        if not any(opener.type == wanted for opener, _ in self.open):
            self.diagnostics.error(
                "E015",
                f"`{token}` closes nothing",
                span_of(token, self.file),
                label="no opening bracket before it",
            )
            return False
        while self.open[-1][0].type != wanted:
            self._close(None)
        self.open.pop()
        return True

    def _close(self, before: Token | None) -> None:
        """Report the innermost open bracket, and close it at the end of the last line."""
        opener, _ = self.open.pop()
        closer = _CLOSER[opener.type]
        related = [Label(span_of(before, self.file), "the next statement begins")] if before else []
        self.diagnostics.error(
            "E014",
            f"this `{opener}` is never closed",
            span_of(opener, self.file),
            related=related,
            help=f"add `{_SHAPE[closer]}`",
        )
        at = len(self.out)
        while at and self.out[at - 1].type == "NEWLINE":
            at -= 1
        self.out.insert(at, Token.new_borrow_pos(closer, _SHAPE[closer], opener))


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
