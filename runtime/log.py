"""The run's log: one JSON object per line and step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import torch


class JsonLog:
    """Appends records to a JSON-lines file, each flushed at once.

    after: None starts the file anew; a step keeps the records up to that one and drops the rest (a run that is resumed
    from a checkpoint repeats the steps after it), as well as a line that a crash has cut.
    echo: a stream that gets the same lines.
    JSON has no nan or inf: they are written as the strings "nan", "inf" and "-inf". One-element tensors are numbers.
    """

    def __init__(self, path: str | Path, after: int | None = None, echo: TextIO | None = None) -> None:
        self.path, self._echo = Path(path), echo
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if after is not None and self.path.is_file():
            _keep_until(self.path, after)
        self._file = self.path.open("w" if after is None else "a", encoding="utf-8")

    def write(self, step: int, **values: Any) -> None:
        """Write one record, `{"step": step, …}`; steps count from 1. Raises TypeError for what JSON cannot say."""
        line = to_line(step=step, **values)
        self._file.write(line + "\n")
        self._file.flush()
        if self._echo is not None:
            print(line, file=self._echo, flush=True)

    def close(self) -> None:
        with suppress(OSError):  # each record has been flushed: what is left here is what could not be written
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def to_line(**values: Any) -> str:
    """One JSON object, as `JsonLog` writes it. Raises TypeError for what JSON cannot say."""
    return json.dumps(_plain(values), allow_nan=False)


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
