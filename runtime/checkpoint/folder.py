"""A checkpoint as a folder: written beside its place and renamed when it is complete, found again, pruned.

    runs/NAME/step-200/.metadata      DCP's index of the tensors
                       __0_0.distcp   what rank 0 wrote of them
                       run.json       `RunState`
    runs/NAME/.step-300.tmp           being written, or left by a crash
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.checkpoint import storage
from runtime.checkpoint.errors import CheckpointError
from runtime.checkpoint.pieces import Held
from runtime.transport import Transport, together

RUN = "run.json"
VERSION = 1
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class RunState:
    """Where a run stood, besides its tensors.

    step: steps taken. optimizer_step: those that the optimizer took. data: the position in the data, as the caller
    gave it. name, plan: of the program, the plan's text where it is known. mesh: of the run that wrote this. seed: of
    sampling and dropout. ties: from other names of tied parameters to their own. transient: the buffers that the model
    does not count as part of its state. loss_scale: see `LossScale.state`.
    """

    step: int
    optimizer_step: int
    seed: int
    name: str
    mesh: dict[str, int]
    plan: str | None = None
    data: dict[str, Any] | None = None
    ties: dict[str, str] = field(default_factory=dict)
    transient: list[str] = field(default_factory=list)
    loss_scale: dict[str, float] | None = None
    version: int = VERSION


def write_folder(path: Path, transport: Transport, tensors: Mapping[str, Held], state: RunState) -> None:
    """Write a checkpoint, and let it appear under `path` when every rank has written its part. Collective.

    What was at `path` before is replaced at once. Raises CheckpointError, on every rank, if any of them fails.
    """
    first = transport.rank == 0
    beside = path.with_name(f".{path.name}.tmp")
    with together(transport, CheckpointError, f"cannot write {path}"):
        if first:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
    with together(transport, CheckpointError, f"cannot write {path}"):
        if not beside.is_dir():
            raise CheckpointError(f"{beside} is not there: a checkpoint needs a folder that all ranks share")
        storage.write(beside, tensors, transport.rank)
    with together(transport, CheckpointError, f"cannot write {path}"):
        if first:
            storage.join(beside, transport.size)
            (beside / RUN).write_text(json.dumps(dataclasses.asdict(state), indent=1) + "\n")
            replace(beside, path)


def replace(beside: Path, path: Path) -> None:
    """Rename, durably; an older folder at `path` makes room first and goes last."""
    for written in (beside / RUN, beside):
        _sync(written)
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    beside.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def read_state(path: Path) -> RunState:
    """The run state of a checkpoint. Raises CheckpointError."""
    try:
        entries = json.loads((path / RUN).read_text())
        if entries["version"] != VERSION:
            raise CheckpointError(f"{path} has version {entries['version']}; this runtime reads version {VERSION}")
        return RunState(**entries)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no complete checkpoint: it has no {RUN}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / RUN} is damaged: {error}") from error


def step_path(directory: str | Path, step: int) -> Path:
    """Where the checkpoint after `step` steps of a run goes."""
    return Path(directory) / f"step-{step}"


def checkpoints(directory: str | Path) -> dict[int, Path]:
    """The checkpoints of a run by step, newest first, complete or not."""
    directory = Path(directory)
    names = sorted(os.listdir(directory)) if directory.is_dir() else []
    found = {int(match[1]): directory / name for name in names if (match := _STEP.fullmatch(name))}
    return dict(sorted(found.items(), reverse=True))


def latest(directory: str | Path, note: Callable[[str], None] = lambda text: None) -> Path | None:
    """The newest complete checkpoint of a run, or None. `note` is told of each broken one that is passed over."""
    for path in checkpoints(directory).values():
        try:
            read_state(path)
            storage.index_of(path)
        except CheckpointError as error:
            note(f"passing over a checkpoint: {error}")
        else:
            return path
    return None


def prune(directory: str | Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what crashes have left. On one rank."""
    directory = Path(directory)
    for path in list(checkpoints(directory).values())[keep:]:
        # Out of sight first, so that a crash while deleting leaves nothing that looks like a checkpoint.
        path.rename(path.with_name(f".{path.name}.old"))
    for name in os.listdir(directory):
        if re.fullmatch(r"\.step-\d+\.(old|tmp)", name):
            shutil.rmtree(directory / name, ignore_errors=True)


def _sync(path: Path) -> None:
    """Make a file's contents, or a folder's entries, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
