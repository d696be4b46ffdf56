"""What is wrong with a program folder. (Apart from `runtime.program`, whose import takes torch's time.)"""

from __future__ import annotations


class ProgramError(Exception):
    """The folder holds no program that this runtime can run; the message says why and what to do."""
