"""Errors that are told in their own words, without a traceback. (Apart from `runtime.program`, whose import takes torch's time.)"""

from __future__ import annotations


class ProgramError(Exception):
    """The folder holds no program that this runtime can run; the message says why and what to do."""


class TrainError(Exception):
    """The run cannot begin; the message says why and what to do."""


class WriteError(Exception):
    """A file of the run cannot be written any more; the message names it and says why."""
