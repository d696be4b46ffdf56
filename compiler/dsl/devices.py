"""The known devices: memory, bandwidth and peak speed, from devices.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from compiler.dsl.units import UNITS, scaled


@dataclass(frozen=True)
class Device:
    """One device's data sheet: bytes, bytes per second, operations per second by dtype."""

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[str, float]


@lru_cache(maxsize=1)
def known_devices() -> dict[str, Device]:
    """Every device by name."""
    table = yaml.safe_load((Path(__file__).parent / "devices.yaml").read_text("utf-8"))
    return {
        name: Device(
            name,
            int(_quantity(entry["memory"])),
            float(_quantity(entry["bandwidth"])),
            {dtype: float(_quantity(speed)) for dtype, speed in entry["flops"].items()},
        )
        for name, entry in table.items()
    }


def _quantity(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(.+)", text).groups()
    return scaled(float(number), UNITS[unit]).value
