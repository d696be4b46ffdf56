"""Whether tensors from elsewhere fit a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.checkpoint.errors import CheckpointError
from runtime.program import Program

_SHOWN = 5  # names, and problems, listed in an error


class Described(Protocol):
    """Anything with the shape and dtype of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class Form:
    """A shape and a dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def check_fit(source: str, found: Mapping[str, Described], wanted: Mapping[str, Described]) -> None:
    """Raise CheckpointError unless `found` has just the wanted tensors, in their shapes.

    The dtype may be another of the same kind: saved in float32, loaded in float64 or bfloat16.
    """
    problems = []
    if missing := [name for name in wanted if name not in found]:
        problems.append(f"{source} lacks {_names(missing)}")
    if extra := [name for name in found if name not in wanted]:
        problems.append(f"the program has no {_names(extra)}")
    for name, need in wanted.items():
        have = found.get(name)
        if have is None:
            continue
        if tuple(have.shape) != tuple(need.shape):
            problems.append(f"{name} has shape {list(have.shape)} in {source} and {list(need.shape)} in the program")
        elif have.dtype.is_floating_point != need.dtype.is_floating_point:
            problems.append(f"{name} is {have.dtype} in {source} and {need.dtype} in the program")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError("; ".join(problems[:_SHOWN]) + more)


def match_names(program: Program, found: Mapping[str, Described]) -> dict[str, str]:
    """From each parameter and persistent buffer of the program to its name in `found`, where any name of a tied
    parameter will do. Buffers that are not persistent may be there and are passed over. Raises CheckpointError."""
    transient = {buffer.name for buffer in program.buffers if not buffer.persistent}
    names: dict[str, str] = {}
    for name in found:
        if name not in transient:
            own = program.ties.get(name, name)
            names[own] = own if own in found else name
    wanted = {
        spec.name: Form(tuple(spec.shape), getattr(torch, spec.dtype))
        for spec in (*program.parameters, *program.buffers)
        if spec.name not in transient
    }
    check_fit("the file", {name: found[given] for name, given in names.items()}, wanted)
    return names


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
