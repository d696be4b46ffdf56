"""planc's runtime: runs compiled programs. Imports torch, never `compiler`.

    session = runtime.load("build/quickstart")
    result = session.step(batch)
"""

from runtime.executor import StepResult
from runtime.program import Program, ProgramError
from runtime.session import BatchError, Session, load

__all__ = ["BatchError", "Program", "ProgramError", "Session", "StepResult", "load"]
