"""Units: what `25MB`, `900GB/s`, `400Gb/s`, `989TFLOPS` and `5us` mean.

Every quantity is kept in its base unit: bytes, bytes per second, operations per second, seconds.
Prefixes are the SI ones (`MB` is 10**6 bytes) and the binary ones (`MiB` is 2**20 bytes).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

BYTES = "bytes"
RATE = "bytes/s"
FLOPS = "FLOPS"
SECONDS = "seconds"

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


@dataclass(frozen=True)
class Quantity:
    """A number with its dimension; a plain number has the dimension `""`."""

    value: int | float | Fraction
    dimension: str = ""


def _table() -> dict[str, Quantity]:
    table: dict[str, Quantity] = {}
    for prefix, factor in (_DECIMAL | _BINARY).items():
        table[f"{prefix}B"] = Quantity(factor, BYTES)
        table[f"{prefix}B/s"] = Quantity(factor, RATE)
        table[f"{prefix}b/s"] = Quantity(Fraction(factor, 8), RATE)
        if prefix in _DECIMAL and prefix != "K":
            table[f"{prefix}FLOPS"] = Quantity(factor, FLOPS)
    for unit, factor in {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}.items():
        table[unit] = Quantity(Fraction(1, factor), SECONDS)
    return table


UNITS: dict[str, Quantity] = _table()

EXAMPLES = {BYTES: "25MB", RATE: "900GB/s", FLOPS: "989TFLOPS", SECONDS: "5us", "": "8"}
NOUNS = {
    BYTES: "a size in bytes",
    RATE: "a bandwidth",
    FLOPS: "a speed in FLOPS",
    SECONDS: "a time",
    "": "a plain number",
}


def scaled(value: int | float, unit: Quantity) -> Quantity:
    """`value` of `unit`."""
    return Quantity(settled(Fraction(value) * Fraction(unit.value), unit.dimension), unit.dimension)


def settled(value: int | float | Fraction, dimension: str) -> int | float:
    """`value` as a whole number where it is one of bytes, else as a float."""
    if dimension == BYTES and value == int(value):
        return int(value)
    return float(value)


def show_size(size: int | float) -> str:
    """`size` bytes in the largest decimal unit that keeps it short: `25MB`."""
    for prefix in ("P", "T", "G", "M", "k"):
        factor = _DECIMAL[prefix]
        if abs(size) >= factor:
            return f"{size / factor:.4g}{prefix}B"
    return f"{size:g}B"
