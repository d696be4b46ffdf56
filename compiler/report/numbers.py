"""Numbers for people."""

from __future__ import annotations


def count(number: float) -> str:
    """1234567 → "1.23M"."""
    for size, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return str(number)


def duration(seconds: float) -> str:
    """0.00123 → "1.23 ms"."""
    for size, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
