"""Tracing that leaves nothing behind: no change of torch's global state, and no noise on the terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import warnings
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from types import ModuleType

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restore grad mode, default dtype, random states and transform stacks, however the body ends."""
    drawn, drawn_numpy = random.getstate(), np.random.get_state()
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
            random.setstate(drawn)
            np.random.set_state(drawn_numpy)
            torch.set_grad_enabled(grad)
            torch.set_default_dtype(dtype)


@contextlib.contextmanager
def real_imports() -> Iterator[None]:
    """A module that is first imported while a model is built or traced gets real tensors of the usual dtype.

    It stays imported: what it makes at its top level must not be fake, nor in the dtype of this capture.
    """
    original = SourceFileLoader.exec_module
    dtype = torch.get_default_dtype()

    def exec_module(self: SourceFileLoader, module: ModuleType) -> None:
        if module.__name__.partition(".")[0] == "torch":
            return original(self, module)
        during = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                original(self, module)
        finally:
            torch.set_default_dtype(during)

    SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign]
    try:
        yield
    finally:
        del SourceFileLoader.exec_module  # what is left is the inherited one


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
