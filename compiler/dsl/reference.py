"""The tables of docs/language.md, made from the declarations that drive the checking.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. `python -m compiler.dsl.reference
docs/language.md` brings them up to date; a test fails when they are not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from compiler.dsl import plan
from compiler.dsl.codes import CODES
from compiler.dsl.devices import known_devices
from compiler.dsl.dtypes import INPUT_DTYPE
from compiler.dsl.kinds import Kind, Size, Text
from compiler.dsl.options import default_of, options_of, patterns_of
from compiler.dsl.schema import STATEMENTS
from compiler.dsl.units import UNITS, show_size

_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def refresh(text: str) -> str:
    """`text` with all its tables up to date."""
    made = tables()
    return _TABLE.sub(lambda m: m[1] + made[m[2]] + m[3], text)


def tables() -> dict[str, str]:
    """Every table by name: one for each statement and optimizer with options, and a few more."""
    made = {
        "statements": _table(("statement", "meaning"), _statements()),
        "codes": _table(("code", "meaning"), ((f"`{c}`", m) for c, m in CODES.items())),
        "devices": _table(("device", "memory", "bandwidth", "bf16"), _devices()),
        "units": _table(("what", "units"), _units()),
        "dtypes": _table(("dtype", "also written"), _dtypes()),
    }
    classes = {k.word: k.spec for k in STATEMENTS.values() if k.spec and options_of(k.spec)}
    for name, cls in (classes | plan.OPTIMIZERS).items():
        made[name] = _table(("option", "value", "default", "meaning"), _options(cls))
    return made


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in row] for row in lines)
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _options(cls: type) -> Iterable[tuple[str, ...]]:
    for pattern in patterns_of(cls).values():
        yield f'`{" ".join(pattern.words)} "…", …`', "patterns", "", pattern.doc
    for name, option in options_of(cls).items():
        default = show_default(option.kind, default_of(cls, name))
        yield f"`{name}`", option.kind.describe(), f"`{default}`", option.doc


def show_default(kind: Kind, value: object) -> str:
    """`value` as a plan would write it."""
    match value:
        case None:
            return "none"
        case bool():
            return "on" if value else "off"
        case tuple():
            return f"({', '.join(f'{v:g}' for v in value)})"
        case str():
            return f'"{value}"' if isinstance(kind, Text) else value
        case int() if isinstance(kind, Size) or isinstance(getattr(kind, "kind", None), Size):
            return show_size(value)
    return f"{value:g}"


def _statements() -> Iterable[tuple[str, ...]]:
    for kind in STATEMENTS.values():
        yield f"`{kind.usage}`", kind.doc


def _devices() -> Iterable[tuple[str, ...]]:
    for device in known_devices().values():
        flops = f"{device.flops['bfloat16'] / 1e12:g}TFLOPS"
        bandwidth = f"{show_size(device.bandwidth)}/s"
        yield f"`{device.name}`", show_size(device.memory), bandwidth, flops


def _units() -> Iterable[tuple[str, ...]]:
    by_dimension: dict[str, list[str]] = {}
    for unit, quantity in UNITS.items():
        by_dimension.setdefault(quantity.dimension, []).append(f"`{unit}`")
    for dimension, units in by_dimension.items():
        yield dimension, " ".join(units)


def _dtypes() -> Iterable[tuple[str, ...]]:
    for word in INPUT_DTYPE.words:
        also = [f"`{a}`" for a, w in INPUT_DTYPE.meaning.items() if w == word and a != word]
        yield f"`{word}`", " ".join(also)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(refresh(path.read_text("utf-8")), "utf-8")
