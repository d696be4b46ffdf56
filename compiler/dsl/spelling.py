"""How one line of tokens is spelled: where spaces go, and which part is set in columns."""

from __future__ import annotations

from dataclasses import dataclass, field

from lark import Token

from compiler.dsl.schema import STATEMENTS

_SIGNS = ("PLUS", "MINUS")
_BINARY = (*_SIGNS, "STAR", "SLASH", "DOUBLESLASH", "PERCENT", "POWER")
_OPERAND_ENDS = ("NAME", "NUMBER", "STRING", "RPAR", "RSQB")


@dataclass
class Line:
    """One line of output: `head` and `body` when its parts stand in columns, else only `body`."""

    indent: int = 0
    tokens: list[Token] = field(default_factory=list)
    comment: str = ""
    blank_before: bool = False
    continues: bool = False  # it goes on with the item of the line before
    opens: bool = False  # it ends with a `{`
    align: str = ""
    head: str = ""
    body: str = ""
    text: str = ""

    @property
    def comment_only(self) -> bool:
        return not self.tokens


def spell(line: Line) -> None:
    """Set `head`, `body` and `align` of a line."""
    tokens = line.tokens
    split = _column(line)
    line.align = ""
    if split:
        line.align = "=" if tokens[split].type == "EQUAL" else "strings"
    line.head = _join(tokens[:split], tight=False) if split else ""
    line.body = _join(tokens[split:], tight=_is_mesh(tokens))


def _column(line: Line) -> int:
    """The index of the token that stands in a column with its neighbours', or 0."""
    tokens = line.tokens
    if line.continues or len(tokens) < 2 or tokens[0].type != "NAME":
        return 0
    types = [t.type for t in tokens]
    if types[1] == "EQUAL":
        return 1 if _separators(types) == 0 else 0
    words = 0
    while words < len(types) and types[words] == "NAME":
        words += 1
    in_block = line.indent > 0
    return words if in_block and words < len(types) and types[words] == "STRING" else 0


def _separators(types: list[str]) -> int:
    """Commas that separate items on one line."""
    depth = count = 0
    for at, kind in enumerate(types):
        depth += (kind in ("LPAR", "LSQB")) - (kind in ("RPAR", "RSQB"))
        count += kind == "COMMA" and depth == 0 and at < len(types) - 1
    return count


def _is_mesh(tokens: list[Token]) -> bool:
    """Does this line begin a statement whose settings are written without spaces?"""
    return bool(tokens) and tokens[0] == "mesh" and len(tokens) > 1 and tokens[1].type == "NAME"


def _join(tokens: list[Token], tight: bool) -> str:
    out = ""
    for at, token in enumerate(tokens):
        if at and _space(tokens, at, tight):
            out += " "
        out += str(token)
    return out


def _space(tokens: list[Token], at: int, tight: bool) -> bool:
    """Is there a space before token `at`?"""
    token, before = tokens[at].type, tokens[at - 1].type
    if token == "COMMA" or token in ("RPAR", "RSQB") or before in ("LPAR", "LSQB"):
        return False
    if before == "LBRACE" or token in ("LBRACE", "RBRACE"):
        return not (before == "LBRACE" and token == "RBRACE")
    if token == "EQUAL" or before == "EQUAL":
        return not tight
    if "POWER" in (token, before):
        return False
    if before in _BINARY and _is_unary(tokens, at - 1):
        return False
    if token in ("LPAR", "LSQB") and before == "NAME":
        return _first_word(tokens, at)
    return True


def _is_unary(tokens: list[Token], at: int) -> bool:
    return tokens[at].type in _SIGNS and (at == 0 or tokens[at - 1].type not in _OPERAND_ENDS)


def _first_word(tokens: list[Token], at: int) -> bool:
    return at == 1 and tokens[0] in STATEMENTS
