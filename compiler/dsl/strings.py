"""The strings with a meaning: factories, patterns, links, data sources."""

from __future__ import annotations

import re
from dataclasses import dataclass

from compiler.dsl.units import RATE, SECONDS, UNITS, scaled

_NAME = r"[^\W\d]\w*"
_DOTTED = rf"{_NAME}(\.{_NAME})*"
_FACTORY = re.compile(rf"({_DOTTED}|[^:\s]*[^:\s/]\.py):{_DOTTED}")
_PATTERN = re.compile(r"[\w.*?\[\]!-]+")
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)([a-zA-Z]+(?:/s)?)")


def wrong_factory(text: str) -> str | None:
    """What is wrong with `module.path:Name` or `path/to/file.py:Name`, if anything."""
    if _FACTORY.fullmatch(text):
        return None
    if not text.endswith(".py") and ":" not in text and re.fullmatch(_DOTTED, text) and "." in text:
        module, _, name = text.rpartition(".")
        return f'`:` stands between the module and the name: "{module}:{name}"'
    return 'this is not of the form "module.path:Name" or "path/to/file.py:Name"'


def wrong_pattern(text: str) -> str | None:
    """What is wrong with a pattern of module names, if anything."""
    if not text:
        return "an empty pattern matches nothing"
    if text.strip() != text or " " in text:
        return "a pattern has no spaces; write one string for each pattern"
    if not _PATTERN.fullmatch(text):
        return "a pattern is made of names, `.`, `*`, `?` and `[…]`"
    if re.sub(r"\[!?\]?[^\[\]]+\]", "", text).count("["):
        return "this `[` is never closed"
    if ".." in text or text.startswith(".") or text.endswith("."):
        return "there is an empty name in this pattern"
    return None


def wrong_data(text: str) -> str | None:
    """What is wrong with a data source, if anything."""
    if text == "synthetic" or _FACTORY.fullmatch(text):
        return None
    if text.startswith("text:") and len(text) > len("text:"):
        return None
    return 'data is "synthetic", "text:<folder>", "text:stdlib" or "module:function"'


def wrong_schedule(text: str) -> str | None:
    """What is wrong with a schedule file's name, if anything."""
    return None if text.endswith(".csv") and len(text) > 4 else "a schedule file ends in .csv"


def wrong_path(text: str) -> str | None:
    """What is wrong with the name of a file or folder, if anything."""
    if not text.strip():
        return "this name is empty"
    return "a file name has no NUL character" if "\0" in text else None


@dataclass(frozen=True)
class Link:
    """A connection between devices: bytes per second, and seconds before the first byte."""

    name: str
    bandwidth: float
    latency: float | None = None


def parse_link(text: str) -> Link | str:
    """`"nvlink 900GB/s"` or `"ib 400Gb/s 5us"` as a `Link`, or what is wrong with it."""
    names: list[str] = []
    found: dict[str, float] = {}
    for word in text.split():
        match = _QUANTITY.fullmatch(word)
        if not match:
            if word[0].isdigit():
                return f"`{word}` is no bandwidth; write for example `900GB/s`"
            names.append(word)
            continue
        unit = UNITS.get(match[2])
        if unit is None:
            return f"there is no unit `{match[2]}`; write for example `900GB/s`"
        if unit.dimension not in (RATE, SECONDS):
            return f"`{word}` is no bandwidth; write for example `{match[1]}GB/s`"
        if unit.dimension in found:
            return "one bandwidth and one latency at most"
        found[unit.dimension] = float(scaled(float(match[1]), unit).value)
    if RATE not in found:
        return 'a bandwidth is missing; write for example "nvlink 900GB/s"'
    if not 0 < found[RATE] < 1e30:
        return "the bandwidth must be more than 0"
    return Link(" ".join(names), found[RATE], found.get(SECONDS))
