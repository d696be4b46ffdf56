"""What can go wrong with checkpoints and weight files."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint cannot be written, is broken, or does not fit the program; the message says why."""
