"""Tokens to the syntax tree, one statement and one item at a time."""

from __future__ import annotations

from lark import Token, Tree
from lark.exceptions import UnexpectedInput, UnexpectedToken

from compiler.diagnostics import Diagnostics, Span, closest
from compiler.dsl import syntax
from compiler.dsl.build import Build
from compiler.dsl.lexer import grammar, lex, normalise, span_of
from compiler.dsl.schema import NOT_NAMES, STATEMENTS
from compiler.dsl.trees import Block, Chunk, split

MAX_EXPRESSION_DEPTH = 40


def parse(text: str, file: str, diagnostics: Diagnostics) -> syntax.File:
    """The syntax tree of a whole file; every mistake in it becomes a diagnostic."""
    text = normalise(text)
    chunks = split(lex(text, file, diagnostics), file, diagnostics)
    parser = Parser(file, diagnostics)
    statements = [s for chunk in chunks for s in parser.statement(chunk)]
    return syntax.File(file, text, tuple(statements))


def parse_value(text: str, file: str) -> syntax.Value | None:
    """`text` as one value, or None if it is not one (used for `--set`)."""
    trial = Diagnostics()
    chunks = split(lex(normalise(text), file, trial), file, trial)
    if trial.errors or len(chunks) != 1:
        return None
    value = Parser(file, trial).value(chunks[0])
    return None if trial.errors else value


class Parser:
    """Parses chunks of one file, and reports what it cannot."""

    def __init__(self, file: str, diagnostics: Diagnostics):
        self.file = file
        self.diagnostics = diagnostics

    def statement(self, chunk: Chunk) -> list[syntax.AnyStatement]:
        """The statement that `chunk` is; `clip` and the like may give several."""
        first = chunk[0]
        if isinstance(first, Token) and first.type == "UNKNOWN":
            return []
        if not isinstance(first, Token) or first.type != "NAME":
            self._unexpected(first, ["a statement"])
            return []
        known = STATEMENTS.get(first)
        second = chunk[1] if len(chunk) > 1 else None
        defines = isinstance(second, Token) and second.type == "EQUAL"
        broken = [syntax.Broken(str(first), span_of(first, self.file))]
        if known is None and not defines:
            meant = self._unknown_statement(first, second)
            return [*broken, *([syntax.Broken(meant, broken[0].span)] if meant else [])]
        if (known and defines and known.form != "CHOICE") or (defines and first in NOT_NAMES):
            self.diagnostics.error(
                "E022",
                f"`{first}` is a statement that takes no `=`"
                if known
                else f"`{first}` cannot be the name of a value",
                span_of(first, self.file),
                label="this word belongs to the language",
                help=(f"the statement is written: {known.usage}",) if known else (),
            )
            return broken
        if known:
            chunk = [first.update(type=known.form), *chunk[1:]]
            if known.form == "STRATEGY" and isinstance(second, Token) and second == "over":
                chunk[1] = second.update(type="OVER")
        tree = self._parse("statement", chunk, known.usage if known else "")
        if tree is None:
            return broken
        block = next((part for part in chunk if isinstance(part, Block)), None)
        items = self._items(block) if block else ()
        built = Build(self.file, items).transform(tree)
        return [s for s in built if self._shallow(s)] or broken

    def value(self, chunk: Chunk) -> syntax.Value | None:
        """The value that `chunk` is."""
        tree = self._parse("value", chunk, "")
        value = Build(self.file, ()).transform(tree) if tree is not None else None
        return value if value is not None and self._shallow_value(value) else None

    def _items(self, block: Block) -> tuple[syntax.Item, ...]:
        items = []
        for chunk in block.items:
            tree = self._parse("item", chunk, "")
            if tree is not None:
                item = Build(self.file, ()).transform(tree)
                if not isinstance(item, syntax.Setting) or self._shallow_value(item.value):
                    items.append(item)
        return tuple(items)

    def _parse(self, start: str, chunk: Chunk, usage: str) -> Tree | None:
        """Run the grammar over one chunk; None (and a diagnostic) if it does not fit."""
        if any(isinstance(part, Token) and part.type == "UNKNOWN" for part in chunk):
            return None  # reported by the lexer
        state = grammar().parse_interactive(start=start)
        last: Token | None = None
        for part in chunk:
            token = part if isinstance(part, Token) else _block_token(part)
            expected = state.accepts()
            try:
                state.feed_token(token)
            except UnexpectedToken:
                self._unexpected(token, _expected(expected, start), start, usage, last)
                return None
            last = token
        expected = state.accepts()
        try:
            return state.feed_eof(last)
        except UnexpectedInput:
            self._unexpected(None, _expected(expected, start), start, usage, last)
            return None

    def _shallow(self, statement: syntax.AnyStatement) -> bool:
        return all([self._shallow_value(v) for v in syntax.values_in(statement)])

    def _shallow_value(self, value: syntax.Value) -> bool:
        if getattr(value, "depth", 0) <= MAX_EXPRESSION_DEPTH:
            return True
        self.diagnostics.error(
            "E016",
            f"this expression is nested more than {MAX_EXPRESSION_DEPTH} deep",
            value.span,
            help="give its parts names",
        )
        return False

    def _unknown_statement(self, first: Token, second: object) -> str | None:
        """Report it; the statement that was probably meant."""
        best = closest(first, STATEMENTS)
        if best:
            help = [f"did you mean `{best}`?", f"it is written: {STATEMENTS[best].usage}"]
        elif first in _ITEM_WORDS:
            help = [f"`{first}` stands inside `{_ITEM_WORDS[first]} … {{ }}`"]
        elif second is None or (isinstance(second, Token) and second.type == "NUMBER"):
            help = [f"a value is given a name with `=`: {first} = {second or '…'}"]
        else:
            help = [f"the statements are: {', '.join(f'`{w}`' for w in STATEMENTS)}"]
        self.diagnostics.error(
            "E021",
            f"there is no statement `{first}`",
            span_of(first, self.file),
            label="unknown statement",
            help=help,
        )
        return best

    def _unexpected(
        self,
        found: Token | Block | None,
        expected: list[str],
        start: str = "statement",
        usage: str = "",
        last: Token | None = None,
    ) -> None:
        wanted = _alternatives(expected)
        if isinstance(found, Block):
            found = _block_token(found)
        if found is None:
            assert last is not None
            span = span_of(last, self.file).end()
            what = "the line" if start == "statement" else "this item" if start == "item" else "it"
            message = f"{what} ends too early: expected {wanted}"
        else:
            span = _block_start(found, self.file)
            message = f"unexpected {_describe(found)}: expected {wanted}"
        self.diagnostics.error(
            "E020",
            message,
            span,
            label=f"expected {wanted}",
            help=(f"the statement is written: {usage}",) if usage else (),
        )


_ITEM_WORDS = {
    word: name
    for name, statement in reversed(STATEMENTS.items())
    for word in statement.item_words()
}


def _block_token(block: Block) -> Token:
    """A whole block as the one terminal that the grammar sees."""
    close = block.close or block.open
    return Token(
        "BLOCK",
        "{ … }",
        block.open.start_pos,
        block.open.line,
        block.open.column,
        close.end_line,
        close.end_column,
        close.end_pos,
    )


def _block_start(token: Token, file: str) -> Span:
    span = span_of(token, file)
    if token.type == "BLOCK":
        return Span(file, span.line, span.column, span.line, span.column + 1)
    return span


_OPERATORS = {"PLUS", "MINUS", "STAR", "SLASH", "DOUBLESLASH", "PERCENT", "POWER"}
_TERMINALS = {
    "NAME": "a name",
    "NUMBER": "a number",
    "STRING": "a string in double quotes",
    "EQUAL": "`=`",
    "COLON": "`:`",
    "COMMA": "`,`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "BLOCK": "`{`",
    "OVER": "`over`",
}
_VALUE = {"NAME", "NUMBER", "STRING", "LPAR", "LSQB"}


def _expected(accepts: set[str], start: str) -> list[str]:
    """What the parser would take, in words, the most likely first."""
    rest = accepts - _OPERATORS
    if start == "item" and "EQUAL" in rest:
        return ["`=`"]
    words = []
    if rest >= _VALUE:
        words.append("a value")
        rest -= _VALUE
    if "$END" in rest:
        rest -= {"$END"}
        words.append("the end of the line" if start == "statement" else "`,` or a new line")
        if start != "statement":
            rest -= {"COMMA"}
        if accepts & _OPERATORS:
            rest -= {"LPAR"}
    words += [_TERMINALS[t] for t in _TERMINALS if t in rest]
    return words or ["an operator"]


def _alternatives(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _describe(token: Token) -> str:
    match token.type:
        case "BLOCK":
            return "`{`"
        case "STRING":
            return "string"
        case "NUMBER":
            return f"number `{token}`"
    return f"`{token}`"
