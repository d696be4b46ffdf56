"""Tracing that leaves nothing behind: no change of torch's global state, and no noise on the terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restore grad mode, default dtype, random state and transform stacks, however the body ends."""
    grad = torch.is_grad_enabled()
    dtype = torch.get_default_dtype()
    depth = _transforms()
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[attr-defined]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            while _transforms() > depth:  # a failure inside vmap can leave its level behind
                torch._C._functorch.pop_dynamic_layer_stack()
            while len(torch.overrides._get_current_function_mode_stack()) > len(modes):  # type: ignore[attr-defined]
                torch.overrides._pop_mode()  # type: ignore[attr-defined]
            torch.set_grad_enabled(grad)
            torch.set_default_dtype(dtype)


def _transforms() -> int:
    stack = torch._C._functorch.get_interpreter_stack()
    return 0 if stack is None else len(stack)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is printed: no warnings, no log records of torch's, no output of the model's."""
    silence = io.StringIO()
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(silence), contextlib.redirect_stdout(silence):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
