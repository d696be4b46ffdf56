"""The run's log: one JSON object per line and step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch


class JsonLog:
    """Appends records to a JSON-lines file, each flushed at once.

    after: None starts the file anew; a step keeps the records up to that one and drops the rest (a run that is resumed
    from a checkpoint repeats the steps after it), as well as a line that a crash has cut.
    JSON has no nan or inf: they are written as the strings "nan", "inf" and "-inf". One-element tensors are numbers.
    """

    def __init__(self, path: str | Path, after: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if after is not None and self.path.is_file():
            _keep_until(self.path, after)
        self._file = self.path.open("w" if after is None else "a", encoding="utf-8")

    def write(self, step: int, **values: Any) -> None:
        """Write one record, `{"step": step, …}`; steps count from 1. Raises TypeError for what JSON cannot say."""
        self._file.write(json.dumps(_plain({"step": step, **values}), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        with suppress(OSError):  # each record has been flushed: what is left here is what could not be written
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The records of a log, as written; a line that a crash has cut is left out, and so is what follows it."""
    records = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _keep_until(path: Path, step: int) -> None:
    kept = [json.dumps(record) + "\n" for record in read_log(path) if record["step"] <= step]
    beside = path.with_name(path.name + ".tmp")
    beside.write_text("".join(kept), encoding="utf-8")
    os.replace(beside, path)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
