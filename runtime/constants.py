"""Constant tensors of a program: a safetensors file beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.program import Program

NAME = "constants.safetensors"


def write_constants(folder: Path, constants: Mapping[str, Tensor]) -> None:
    """Write the constants, if there are any."""
    if constants:
        save_file({name: tensor.contiguous() for name, tensor in constants.items()}, str(folder / NAME))


def read_constants(program: Program) -> dict[str, Tensor]:
    """The program's constants by name, on the CPU."""
    if not program.constants or program.folder is None:
        return {}
    return load_file(str(program.folder / NAME))
