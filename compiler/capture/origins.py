"""Where in the user's model a traced operator comes from: module path and source line."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compiler.ir.graph import Origin

FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
OWN = Path(__file__).resolve().parent.parent.parent


@cache
def is_torch(file: str) -> bool:
    """Whether a source file is torch's own, or not a file at all."""
    return file.startswith("<") or Path(file).is_relative_to(Path(torch.__file__).parent)


@cache
def is_installed(file: str) -> bool:
    """Whether a source file belongs to Python, to an installed package or to planc."""
    path = Path(file)
    packages = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    inside = any(path.is_relative_to(folder) for folder in packages if folder)
    return is_torch(file) or inside or is_own(file)


@cache
def shown(file: str) -> str:
    """The path relative to the working directory, if it lies in it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def code_at(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()


@cache
def is_own(file: str) -> bool:
    """Whether a source file is planc's."""
    path = Path(file)
    return path.is_relative_to(OWN / "compiler") or path.is_relative_to(OWN / "runtime")


class Origins:
    """Origins of the nodes of one exported graph. `prefix` is the model's path inside what was exported."""

    def __init__(self, model: nn.Module, prefix: str):
        self.prefix = prefix
        self.files = {path: _file_of(type(module)) for path, module in model.named_modules(remove_duplicate=False)}

    def of(self, meta: dict[str, Any], fallback: Origin) -> Origin:
        """The origin that a node's metadata tells; without any, that of the node before."""
        stack = meta.get("nn_module_stack") or {}
        paths = [path for path, _ in stack.values() if path == self.prefix or path.startswith(f"{self.prefix}.")]
        paths = [path[len(self.prefix) + 1 :].partition("@")[0] for path in paths]
        if not meta.get("stack_trace"):
            return Origin(paths[-1], fallback.source, fallback.code) if paths else fallback
        place = self.place(meta["stack_trace"], tuple(paths))
        module = paths[-1] if paths else ""
        if place is None:
            return Origin(module)
        file, line = place
        return Origin(module, f"{shown(file)}:{line}", code_at(file, line))

    def place(self, trace: str, paths: tuple[str, ...]) -> tuple[str, int] | None:
        """(file, line) of the innermost frame in the user's code, else in the file of the innermost module."""
        return _place(trace, tuple(self.files.get(path, "") for path in paths))


@cache
def _place(trace: str, module_files: tuple[str, ...]) -> tuple[str, int] | None:
    frames = [(file, int(line)) for file, line in FRAME.findall(trace)]
    frames = [frame for frame in frames if not is_torch(frame[0])]
    for file, line in reversed(frames):
        if not is_installed(file):
            return file, line
    for wanted in reversed(module_files):
        for file, line in reversed(frames):
            if file == wanted and not is_torch(file):
                return file, line
    return next((frame for frame in reversed(frames) if not is_own(frame[0])), None)


@cache
def _file_of(cls: type) -> str:
    try:
        return inspect.getsourcefile(cls) or ""
    except (TypeError, OSError):
        return getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
