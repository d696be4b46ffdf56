"""Reading plan files, with what they include, into one list of statements.

Rules: a file is read once, however often it is included. A statement that may stand once (a name,
an input, `mesh`, `data`, …) may not stand twice in one file; across files the including file
wins, wherever its `include` stands, and of two included files the later one. Statements that may
stand many times (`recompute`, `opaque`, …) add up, those of included files first.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from compiler.diagnostics import Diagnostics, Label, Span, closest
from compiler.dsl import syntax
from compiler.dsl.parser import parse
from compiler.dsl.schema import MANY, STATEMENTS

MAX_INCLUDES = 30


@dataclass
class Program:
    """The statements that count, in order, and everything that was read to find them."""

    statements: list[syntax.AnyStatement] = field(default_factory=list)
    written: list[syntax.AnyStatement] = field(default_factory=list)
    duplicates: list[syntax.AnyStatement] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    sites: dict[str, tuple[Label, ...]] = field(default_factory=dict)  # of each file's includes
    incomplete: bool = False  # some file could not be read

    def broken(self, word: str) -> bool:
        """Was there a statement `word` that could not be parsed?"""
        return any(isinstance(s, syntax.Broken) and s.word == word for s in self.written)


def read_text(
    path: str, diagnostics: Diagnostics, site: syntax.Include | None = None
) -> str | None:
    """The text of a plan file, or None and a diagnostic."""
    span = site.path.span if site else None
    try:
        return Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        diagnostics.error(
            "E002",
            f"{path} is not UTF-8 text (byte {error.start})",
            span,
            help="save it as UTF-8",
        )
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        diagnostics.error(
            "E001", f"cannot read {path!r}: {reason}", span, help=_neighbours(path)
        )
    return None


def read_program(path: str, text: str, diagnostics: Diagnostics) -> Program:
    """Parse `text`, which stands in file `path`, and all that it includes."""
    program = Program()
    reader = _Reader(program, diagnostics)
    program.statements = list(reader.read(path, text, ()).values())
    return program


Key = tuple


@dataclass
class _Reader:
    """Follows includes depth first."""

    program: Program
    diagnostics: Diagnostics
    seen: set[Path] = field(default_factory=set)

    def read(self, path: str, text: str, chain: tuple[syntax.Include, ...]) -> dict:
        """The statements of one file and its includes, by the key under which one wins."""
        self.seen.add(_identity(path))
        tree = parse(text, path, self.diagnostics)
        self.program.sources[path] = tree.text
        self.program.sites[path] = tuple(Label(s.path.span, "included here") for s in chain)
        self.program.written += tree.statements
        merged: dict[Key, syntax.AnyStatement] = {}
        own: dict[Key, syntax.AnyStatement] = {}
        for number, statement in enumerate(tree.statements):
            if isinstance(statement, syntax.Include):
                continue
            key = (*_key(statement), *((path, number) if _repeats(statement) else ()))
            if key in own:
                self._twice(statement, own[key])
                self.program.duplicates.append(statement)
            else:
                own[key] = statement
        for statement in tree.statements:
            if isinstance(statement, syntax.Include):
                merged |= self._include(statement, path, chain)
        return merged | own

    def _include(self, site: syntax.Include, path: str, chain: tuple[syntax.Include, ...]) -> dict:
        here = Path() if path.startswith("<") else Path(path).parent
        target = str(here / site.path.text)
        span = site.path.span
        open_files = [_identity(path), *(_identity(s.span.file) for s in chain)]
        if "\0" in target or not site.path.text.strip():
            self.diagnostics.error("E046", "this is no file name", span)
            self.program.incomplete = True
            return {}
        if _identity(target) in open_files:
            circle = open_files[: open_files.index(_identity(target)) + 1]
            shown = " → ".join((*(f.name for f in reversed(circle)), Path(target).name))
            self.diagnostics.error("E003", f"these plans include each other: {shown}", span)
            return {}
        if len(chain) >= MAX_INCLUDES:
            message = f"includes are nested more than {MAX_INCLUDES} deep"
            self.diagnostics.error("E003", message, span)
            return {}
        if _identity(target) in self.seen:
            return {}
        text = read_text(target, self.diagnostics, site)
        if text is None:
            self.program.incomplete = True
            return {}
        return self.read(target, text, (site, *chain))

    def _twice(self, statement: syntax.AnyStatement, first: syntax.AnyStatement) -> None:
        word, place = _title(statement)
        self.diagnostics.error(
            "E030",
            f"{word} is given twice",
            place,
            label="given again here",
            related=[Label(_title(first)[1], "first given here")],
        )


def show_include_sites(program: Program, diagnostics: Diagnostics) -> None:
    """Add to every diagnostic about an included file the places where that was included."""
    diagnostics.items = [
        replace(d, related=(*d.related, *program.sites.get(d.span.file, ()))) if d.span else d
        for d in diagnostics.items
    ]


def _identity(path: str) -> Path:
    try:
        return Path(path).resolve()
    except (OSError, ValueError, RuntimeError):
        return Path(path)


def _repeats(statement: syntax.AnyStatement) -> bool:
    """May this statement stand many times?"""
    if isinstance(statement, syntax.Statement):
        return STATEMENTS[statement.word.name].times == MANY
    return isinstance(statement, syntax.Broken)


def _key(statement: syntax.AnyStatement) -> Key:
    """Two statements with the same key are about the same thing."""
    match statement:
        case syntax.Definition():
            return ("name", statement.name.name)
        case syntax.Input():
            return ("input", statement.name.name)
        case syntax.Broken():
            return ("broken",)
    word = statement.word.name
    if STATEMENTS[word].merges:
        return (word, statement.items[0].name.name)
    return (word,)


def _title(statement: syntax.AnyStatement) -> tuple[str, Span]:
    match statement:
        case syntax.Definition():
            return f"the name `{statement.name.name}`", statement.name.span
        case syntax.Input():
            return f"the input `{statement.name.name}`", statement.name.span
    word = statement.word.name
    if STATEMENTS[word].merges:
        name = statement.items[0].name
        return f"`{word} {name.name}`", name.span
    return f"`{word}`", statement.word.span


def _neighbours(path: str) -> tuple[str, ...]:
    """A suggestion from the files beside a missing one."""
    try:
        names = [p.name for p in Path(path).parent.iterdir() if p.suffix == ".plan"]
    except (OSError, ValueError):
        return ()
    best = closest(Path(path).name, names[:1000])
    return (f"did you mean `{best}`?",) if best else ()
