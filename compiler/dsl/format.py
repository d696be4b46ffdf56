"""`planc fmt`: one layout for every plan.

The formatter works on tokens, so that it keeps everything it does not understand, comments above
all. It keeps the writer's line ends and groups (blank lines, one-line blocks), and settles spaces,
indentation, commas at line ends, and columns: the `=` of neighbouring settings, the patterns of
neighbouring pattern items, and neighbouring trailing comments stand below each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from lark import Token

from compiler.diagnostics import Diagnostics
from compiler.dsl.lexer import lex, normalise
from compiler.dsl.parser import parse
from compiler.dsl.spelling import Line, spell

INDENT = 4
WIDEST_COLUMN = 32


def format_text(text: str) -> str:
    """`text` in the standard layout; raises `PlanError` if its syntax is wrong."""
    diagnostics = Diagnostics()
    text = normalise(text)
    parse(text, "<plan>", diagnostics)
    diagnostics.raise_if_errors({"<plan>": text})
    pieces = _pieces(lex(text, "<plan>", diagnostics))
    lines = _lines(_without_commas(_settle_breaks(_join_braces(pieces))))
    for line in lines:
        spell(line)
    _align(lines)
    out = ["\n" * line.blank_before + line.text for line in lines]
    return "\n".join(out) + "\n" if out else ""


@dataclass
class Piece:
    """A token (or comment) and the number of line ends before it."""

    token: Token
    newlines: int
    multiline: bool = False  # of a brace: does its block stand on several lines?

    @property
    def type(self) -> str:
        return self.token.type


def _pieces(tokens: list[Token]) -> list[Piece]:
    pieces: list[Piece] = []
    newlines = 1
    for token in tokens:
        if token.type == "NEWLINE":
            newlines += 1
        else:
            pieces.append(Piece(token, newlines))
            newlines = 0
    return pieces


def _join_braces(pieces: list[Piece]) -> list[Piece]:
    """Move a `{` on a line of its own to the end of the line that it belongs to."""
    out: list[Piece] = []
    for piece in pieces:
        if piece.type == "LBRACE":
            at = len(out)
            while at and out[at - 1].type == "COMMENT":
                at -= 1
            out.insert(at, Piece(piece.token, 0))
        else:
            out.append(piece)
    return out


def _settle_breaks(pieces: list[Piece]) -> list[Piece]:
    """Decide which blocks stand on several lines, and break them at their braces."""
    stack: list[Piece] = []
    for piece in pieces:
        if piece.newlines or piece.type == "COMMENT":
            for brace in stack:
                brace.multiline = True
        if piece.type == "LBRACE":
            stack.append(piece)
        elif piece.type == "RBRACE":
            piece.multiline = stack.pop().multiline
    previous: Piece | None = None
    for piece in pieces:
        after_open = previous is not None and previous.type == "LBRACE" and previous.multiline
        trailing = piece.type == "COMMENT" and not piece.newlines
        if after_open and not trailing:
            piece.newlines = 1
        elif piece.type == "RBRACE":
            piece.newlines = int(piece.multiline)
        if not trailing or not after_open:
            previous = piece
    return pieces


def _without_commas(pieces: list[Piece]) -> list[Piece]:
    """Leave out the commas between items that a line end or a brace separates anyway."""
    out: list[Piece] = []
    blocks = brackets = 0
    for at, piece in enumerate(pieces):
        blocks += (piece.type == "LBRACE") - (piece.type == "RBRACE")
        brackets += (piece.type in ("LPAR", "LSQB")) - (piece.type in ("RPAR", "RSQB"))
        if piece.type == "COMMA" and blocks and not brackets:
            code = next(p for p in pieces[at + 1 :] if p.type != "COMMENT")
            follows = pieces[at + 1]
            ends = follows.newlines or follows.type == "COMMENT" or code.type == "RBRACE"
            if ends and code.type != "STRING":
                continue
        out.append(piece)
    return out


def _lines(pieces: list[Piece]) -> list[Line]:
    """Cut at the line ends, and indent."""
    lines: list[Line] = []
    depth = brackets = 0
    before = ""  # the type of the last piece that is not a comment
    for piece in pieces:
        closing = piece.type in ("RBRACE", "RPAR", "RSQB")
        if piece.type == "RBRACE":
            depth -= piece.multiline
        if piece.newlines or not lines:
            inside = brackets > 0 or (before == "COMMA" and piece.type == "STRING")
            indent = INDENT * (depth + (inside and not closing))
            first = not lines or before == "LBRACE" or lines[-1].opens
            blank = piece.newlines > 1 and not inside and piece.type != "RBRACE"
            blank = blank and bool(lines) and not (first and not lines[-1].comment_only)
            lines.append(Line(indent, blank_before=blank, continues=inside))
        if piece.type == "COMMENT":
            lines[-1].comment = str(piece.token).rstrip()
            continue
        lines[-1].tokens.append(piece.token)
        lines[-1].opens = piece.type == "LBRACE"
        depth += piece.type == "LBRACE" and piece.multiline
        brackets += (piece.type in ("LPAR", "LSQB")) - (piece.type in ("RPAR", "RSQB"))
        before = piece.type
    return lines


def _align(lines: list[Line]) -> None:
    """Put the parts of neighbouring lines below each other."""
    for run in _runs([x for x in lines if not x.continues], lambda line: line.align):
        width = max(len(line.head) for line in run)
        if width <= WIDEST_COLUMN:
            for line in run:
                line.head = line.head.ljust(width)
    for line in lines:
        gap = " " if line.head and line.body else ""
        line.text = (" " * line.indent + line.head + gap + line.body).rstrip()
    for run in _runs(lines, lambda line: "comment" if line.comment and line.text else ""):
        width = max(len(line.text) for line in run)
        for line in run:
            line.text = f"{line.text.ljust(width)}  {line.comment}"
    for line in lines:
        if line.comment and not line.tokens:
            line.text = " " * line.indent + line.comment


def _runs(lines: list[Line], kind) -> list[list[Line]]:
    """Groups of lines of one kind and depth, with nothing between them."""
    runs: list[list[Line]] = []
    last = ("", -1)
    for line in lines:
        this = (kind(line), line.indent)
        if this[0]:
            if this == last and not line.blank_before:
                runs[-1].append(line)
            else:
                runs.append([line])
        last = this
    return runs
