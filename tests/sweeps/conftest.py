"""Sweeps are wide: `--full` runs them, and a model is captured once for all plans that ask the same of capture."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path

import pytest

from compiler.capture import Captured, CaptureRequest, capture

HERE = Path(__file__).parent
REMEMBERED: dict[str, bytes] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.full)


def remembered(request: CaptureRequest) -> Captured:
    """What `capture` gives for this request, of which every plan gets its own copy."""
    key = re.sub(r"Span\([^)]*\)", "", repr(dataclasses.replace(request, sources={})))
    if key not in REMEMBERED:
        REMEMBERED[key] = pickle.dumps(capture(request))
    return pickle.loads(REMEMBERED[key])


@pytest.fixture(autouse=True)
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiler.driver.capture", remembered)
