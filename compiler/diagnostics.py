"""Diagnostics: what is wrong in a plan, where, and what would be right.

Every stage reports users' mistakes as `Diagnostic`s collected in a `Diagnostics`;
`raise_if_errors` ends a stage with one `PlanError` that carries all of them.
`render` prints them in the manner of rustc and elm:

    error[E032]: `zero` has no option `stge`
      --> demo.plan:12:16
       |
    12 | zero over dp { stge = 3 }
       |                ^^^^ not an option of `zero`
       |
       = help: did you mean `stage`?

A stage declares its own codes with `declare_codes`; `CODES` explains each in one line.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

CODES: dict[str, str] = {}


def declare_codes(table: Mapping[str, str]) -> None:
    """Add a stage's codes to `CODES`; a code keeps one meaning for ever."""
    for code, meaning in table.items():
        if CODES.setdefault(code, meaning) != meaning:
            raise ValueError(f"diagnostic code {code} is declared twice")


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A place in a source text. Lines and columns count from 1; the end is exclusive."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of `other`."""
        return Span(self.file, self.line, self.column, other.end_line, other.end_column)

    def end(self) -> Span:
        """The single position just after this span."""
        return Span(
            self.file, self.end_line, self.end_column, self.end_line, self.end_column + 1
        )

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Label:
    """A second place that helps to understand a diagnostic, and what to say there."""

    span: Span
    text: str = ""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One thing to tell the user. `severity` is `error`, `warning` or `note`."""

    severity: str
    code: str
    message: str
    span: Span | None = None
    label: str = ""
    notes: tuple[str, ...] = ()
    help: tuple[str, ...] = ()
    related: tuple[Label, ...] = ()

    def __str__(self) -> str:
        place = f"{self.span}: " if self.span else ""
        return f"{place}{self.severity}[{self.code}]: {self.message}"


class PlanError(Exception):
    """The user's plan (or model) is at fault; `diagnostics` says how, `sources` holds the texts."""

    def __init__(
        self, diagnostics: Iterable[Diagnostic], sources: Mapping[str, str] | None = None
    ):
        self.diagnostics = list(diagnostics)
        self.sources = dict(sources or {})
        super().__init__(self.diagnostics)

    def __str__(self) -> str:
        return "\n" + render(self.diagnostics, self.sources)


@dataclass
class Diagnostics:
    """Collects diagnostics, so that one run reports every mistake it can find."""

    items: list[Diagnostic] = field(default_factory=list)
    _seen: set[Diagnostic] = field(default_factory=set, repr=False)

    def error(self, code: str, message: str, span: Span | None = None, **more) -> Diagnostic:
        """Record an error; `more` is `label`, `notes`, `help`, `related`."""
        return self._record("error", code, message, span, **more)

    def warning(self, code: str, message: str, span: Span | None = None, **more) -> Diagnostic:
        """Record a warning."""
        return self._record("warning", code, message, span, **more)

    def note(self, code: str, message: str, span: Span | None = None, **more) -> Diagnostic:
        """Record a remark that needs no action."""
        return self._record("note", code, message, span, **more)

    def _record(
        self,
        severity: str,
        code: str,
        message: str,
        span: Span | None,
        *,
        label: str = "",
        notes: str | Sequence[str] = (),
        help: str | Sequence[str] = (),
        related: Sequence[Label] = (),
    ) -> Diagnostic:
        diagnostic = Diagnostic(
            severity, code, message, span, label, _lines(notes), _lines(help), tuple(related)
        )
        self.extend([diagnostic])
        return diagnostic

    def extend(self, diagnostics: Iterable[Diagnostic]) -> None:
        """Record diagnostics made elsewhere; the same one is kept once."""
        for diagnostic in diagnostics:
            if diagnostic not in self._seen:
                self._seen.add(diagnostic)
                self.items.append(diagnostic)

    @property
    def errors(self) -> list[Diagnostic]:
        return [d for d in self.items if d.severity == "error"]

    @property
    def warnings(self) -> list[Diagnostic]:
        return [d for d in self.items if d.severity == "warning"]

    def raise_if_errors(self, sources: Mapping[str, str] | None = None) -> None:
        """Raise one `PlanError` with everything recorded, if any of it is an error."""
        if self.errors:
            raise PlanError(self.items, sources)

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


def closest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `name` is most likely a misspelling of, if one is near. Of a pattern, the candidates are made
    such patterns."""
    if any(wild in name for wild in "*?["):
        candidates = [_as_pattern(name, candidate) for candidate in candidates]
    pool = {c.lower(): c for c in reversed(list(dict.fromkeys(candidates)))}
    wanted = name.lower()[:80]
    near = difflib.get_close_matches(wanted, list(pool), n=5, cutoff=0.6)
    near += [c for c in pool if sorted(c) == sorted(wanted)]
    if not near:
        return None
    return pool[min(near, key=lambda c: (_typing_distance(wanted, c), sorted(c) != sorted(wanted)))]


def _as_pattern(pattern: str, name: str) -> str:
    """The name with what the pattern leaves open left open too: `layers.*.atn.w[qk]`, layers.3.attn.wq →
    `layers.*.attn.w[qk]`."""
    wanted, parts = pattern.split("."), name.split(".")
    if len(wanted) != len(parts):
        return ".".join("*" if part.isdigit() and "*" in wanted else part for part in parts)
    return ".".join(own if fnmatchcase(part, own) else part for own, part in zip(wanted, parts))


def _typing_distance(a: str, b: str) -> int:
    """Letters added, left out, changed or swapped with their neighbour."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, start=1):
        row = [i]
        for j, y in enumerate(b, start=1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]


def did_you_mean(name: str, candidates: Iterable[str]) -> tuple[str, ...]:
    """A help line with the closest candidate, or with all of them when they are few."""
    pool = list(dict.fromkeys(candidates))
    best = closest(name, pool)
    if best is not None:
        return (f"did you mean `{best}`?",)
    if pool and len(pool) <= 12:
        return (f"known here: {', '.join(f'`{c}`' for c in pool)}",)
    return ()


def _lines(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


# --- rendering -------------------------------------------------------------------------

_COLORS = {"error": "1;31", "warning": "1;33", "note": "1;36", "dim": "1;34", "bold": "1"}
_WIDEST = 160


def render(
    diagnostics: Iterable[Diagnostic],
    sources: Mapping[str, str] | None = None,
    color: bool = False,
) -> str:
    """All diagnostics as text, in source order, with a last line that counts them."""
    ordered = sorted(diagnostics, key=_order)
    painter = _Painter(dict(sources or {}), color)
    blocks = [painter.block(d) for d in ordered]
    if ordered:
        blocks.append(summary(ordered) + "\n")
    return "\n".join(blocks)


def summary(diagnostics: Iterable[Diagnostic]) -> str:
    """`2 errors, 1 warning`."""
    counts: dict[str, int] = {}
    for d in diagnostics:
        counts[d.severity] = counts.get(d.severity, 0) + 1
    parts = []
    for severity in ("error", "warning", "note"):
        if n := counts.get(severity):
            parts.append(f"{n} {severity}{'s' if n > 1 else ''}")
    return ", ".join(parts)


def to_json(diagnostics: Iterable[Diagnostic]) -> list[dict]:
    """All diagnostics as plain lists and dicts, for `--json`."""

    def place(span: Span | None) -> dict | None:
        if span is None:
            return None
        return {name: getattr(span, name) for name in Span.__dataclass_fields__}

    return [
        {
            "severity": d.severity,
            "code": d.code,
            "message": d.message,
            "span": place(d.span),
            "label": d.label,
            "notes": list(d.notes),
            "help": list(d.help),
            "related": [{"span": place(r.span), "text": r.text} for r in d.related],
        }
        for d in sorted(diagnostics, key=_order)
    ]


def _order(d: Diagnostic) -> tuple:
    severity = ("error", "warning", "note").index(d.severity)
    return (d.span is not None, severity, d.span or Span("", 0, 0, 0, 0))


@dataclass
class _Painter:
    """Draws one diagnostic after another; reads a source that it was not given from disk."""

    sources: dict[str, str]
    color: bool

    def block(self, d: Diagnostic) -> str:
        head = self._paint(f"{d.severity}[{d.code}]", d.severity)
        out = [head + self._paint(f": {d.message}", "bold")]
        places = [(d.span, d.label, "^")] if d.span else []
        places += [(r.span, r.text, "-") for r in d.related]
        width = max([len(str(span.line)) for span, _, _ in places], default=1)
        bar = " " * (width + 1) + self._paint("|", "dim")
        for number, (span, label, mark) in enumerate(places):
            arrow = "-->" if number == 0 else ":::"
            out.append(f"{' ' * width}{self._paint(arrow, 'dim')} {span}")
            out += self._excerpt(span, label, mark, d.severity, width, bar)
        if places and (d.notes or d.help):
            out.append(bar)
        for kind, lines in (("note", d.notes), ("help", d.help)):
            for line in lines:
                text = line.replace("\n", "\n" + " " * (width + 9))
                out.append(f"{' ' * (width + 1)}{self._paint('=', 'dim')} {kind}: {text}")
        return "\n".join(out) + "\n"

    def _excerpt(
        self, span: Span, label: str, mark: str, severity: str, width: int, bar: str
    ) -> list[str]:
        lines = self._source(span.file)
        if not 1 <= span.line <= max(len(lines), 1):
            return [f"{bar} {label}"] if label else []
        line = lines[span.line - 1] if lines else ""
        start = min(span.column - 1, len(line))
        stop = span.end_column - 1 if span.end_line == span.line else len(line)
        stop = max(min(stop, len(line)), start + 1)
        shift = max(0, start - _WIDEST // 2) if len(line) > _WIDEST else 0
        shown = _printable(line[shift : shift + _WIDEST])
        before = _cells(_printable(line[shift:start]))
        length = max(1, _cells(_printable(line[start : min(stop, shift + _WIDEST)])))
        under = self._paint(mark * length, severity if mark == "^" else "dim")
        text = self._paint(f" {label}", severity if mark == "^" else "dim") if label else ""
        number = self._paint(f"{span.line:>{width}} |", "dim")
        return [bar, f"{number} {shown}".rstrip(), f"{bar} {' ' * before}{under}{text}"]

    def _source(self, file: str) -> list[str]:
        if file not in self.sources:
            try:
                self.sources[file] = Path(file).read_text("utf-8")
            except (OSError, ValueError):
                self.sources[file] = ""
        return self.sources[file].split("\n")

    def _paint(self, text: str, style: str) -> str:
        return f"\x1b[{_COLORS[style]}m{text}\x1b[0m" if self.color else text


def _printable(text: str) -> str:
    """`text` with tabs as one space and control characters as `?`, so that columns line up."""
    return "".join(
        " " if c == "\t" else c if unicodedata.category(c)[0] != "C" else "?" for c in text
    )


def _cells(text: str) -> int:
    """Terminal columns that `text` takes."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )
