"""planc's runtime: runs compiled programs. Uses torch, never `compiler`.

    session = runtime.load("build/quickstart")
    result = session.step(batch)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.executor import StepResult
    from runtime.program import Program, ProgramError
    from runtime.session import BatchError, Session, load

_HOMES = {
    "BatchError": "session",
    "Program": "program",
    "ProgramError": "program",
    "Session": "session",
    "StepResult": "executor",
    "load": "session",
}

__all__ = ["BatchError", "Program", "ProgramError", "Session", "StepResult", "load"]


def __getattr__(name: str) -> Any:
    # Imported on first use: torch takes its time, and Ctrl-C must find something that answers it meanwhile.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"runtime.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
