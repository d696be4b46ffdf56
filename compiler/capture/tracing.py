"""What runs differently while a model is traced, and what is refused because tracing would change its meaning.

Made up for:
- gradients switched off (`torch.no_grad()`) and `.data` become `detach`, which tracing keeps;
- export reads the value of a zero-dimensional index (`x[i]`, `i` a tensor), which it does not have; indexing with it as
  a tensor is the same;
- dropout of whole channels is dropout of a factor for each;
- reentrant activation checkpointing just calls its function;
- for verification in float64, casts to narrower floating types become casts to float64.

Refused: reading values, sizes that depend on data, gradients handled by hand (custom autograd functions, hooks,
`autograd.grad`), and changes in place behind autograd's back.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from compiler.capture.failures import Unsupported
from compiler.capture.origins import code_at, is_installed, is_own, is_torch, shown
from compiler.ir.graph import Origin

NARROW = (torch.float32, torch.bfloat16, torch.float16)
TOP = str(Path(__file__).with_name("wrapper.py"))
"""The file from which the model is called: what is further out is not the model's."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
READS = {
    "__bool__": "an `if`, `while`, `and`, `or`, `not` or `assert` looks at a tensor's value",
    "item": "`.item()` reads a tensor's value",
    "tolist": "`.tolist()` reads a tensor's values",
    "numpy": "`.numpy()` reads a tensor's values",
    "__int__": "`int(…)` reads a tensor's value",
    "__float__": "`float(…)` reads a tensor's value",
    "__index__": "a tensor's value is used as an index or a size",
}
BY_HAND = {
    "register_hook": "a hook changes gradients",
    "register_post_accumulate_grad_hook": "a hook runs when a gradient is ready",
    "backward": "the forward calls `backward`",
    "grad": "the forward computes gradients with `torch.autograd.grad`",
}


class Tracing(TorchFunctionMode):
    """The calls that a model makes while it is traced."""

    def __init__(self, model: nn.Module, widen: bool):
        super().__init__()
        self.widen = widen
        self.paths = {id(module): path for path, module in model.named_modules()}

    def __enter__(self) -> Tracing:
        self.patches = contextlib.ExitStack()
        self.patches.enter_context(custom_functions(self.here))
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self.patches.close()

    def here(self) -> Origin:
        """The line of the model's code that is running."""
        return running_line(self.paths)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is Tensor.__getitem__ and (indices := scalar_indices(args[1])) is not None:
            func, args = torch.ops.aten.index.Tensor, (args[0], indices)
        elif name in ("__get__", "__set__") and getattr(func, "__self__", None) is Tensor.data:
            return self.data(name, args)
        elif name in READS and args and isinstance(args[0], Tensor):
            return self.read(func, name, args, kwargs)
        elif name in BY_HAND and func in HANDS:
            raise Unsupported(BY_HAND[name], self.here(), "E126")
        elif name in CHANNEL_DROPOUT:
            return channel_dropout(name, *args, **kwargs)
        elif func is Tensor.fill_diagonal_ and args[0].dim() == 2:
            return fill_diagonal(*args, **kwargs)
        if self.widen:
            args, kwargs = pytree.tree_map(widened, (args, kwargs)) if has_dtype(args, kwargs) else (args, kwargs)
            if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
                func = Tensor.double
        if torch.is_grad_enabled() or name == "_set_grad_enabled":
            return self.sized(func(*args, **kwargs))
        return self.without_gradient(func, name, args, kwargs)

    def without_gradient(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Results are detached, as in eager under `torch.no_grad()`."""
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place and isinstance(args[0], Tensor) and args[0].requires_grad and name != "requires_grad_":
            what = "a parameter" if isinstance(args[0], nn.Parameter) else "a tensor that has a gradient"
            code = "E124" if isinstance(args[0], nn.Parameter) else "E126"
            raise Unsupported(f"`{name}` changes {what} without autograd's knowledge", self.here(), code)
        result = self.sized(func(*args, **kwargs))
        return result if in_place else pytree.tree_map(detached, result)

    def data(self, name: str, args: Any) -> Any:
        if name == "__set__":
            raise Unsupported("an assignment to `.data` changes a tensor", self.here(), "E124")
        return args[0].detach()

    def read(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Values of constants can be read; those of everything else are not there yet."""
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            raise Unsupported(READS[name], self.here(), "E122") from error
        if any(isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) for x in pytree.tree_leaves(result)):
            raise Unsupported(READS[name], self.here(), "E122")
        return result

    def sized(self, result: Any) -> Any:
        """The result, if its size is fixed."""
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor) and any(isinstance(size, torch.SymInt) for size in item.shape):
                raise Unsupported("the size of a result depends on values", self.here(), "E122")
        return result


CHANNEL_DROPOUT = {"dropout1d": 2, "dropout2d": 0, "dropout3d": 4, "feature_dropout": 0}
"""Functions that drop whole channels, with the number of dimensions at which they take a sample without its batch."""


def fill_diagonal(x: Tensor, value: float, wrap: bool = False) -> Tensor:
    """With a mask: made functional, the operator itself becomes one whose derivative is wrong in torch."""
    rows, columns = x.shape
    diagonal = torch.eye(rows, columns, dtype=torch.bool, device=x.device)
    if wrap and rows > columns:
        diagonal = (torch.arange(rows * columns, device=x.device) % (columns + 1) == 0).view(rows, columns)
    return x.masked_fill_(diagonal, value)


def channel_dropout(
    name: str, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> Tensor:
    """The same as dropout of one number for each channel (its own decomposition draws in another way)."""
    if not (training and train) or p == 0:
        return input
    kept = 1 if input.dim() == CHANNEL_DROPOUT[name] else 2
    factor = nn.functional.dropout(input.new_ones((*input.shape[:kept], *[1] * (input.dim() - kept))), p)
    return input.mul_(factor) if inplace else input * factor


HANDS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.backward, torch.autograd.grad,
         torch.autograd.backward}  # fmt: skip


def scalar_indices(index: Any) -> list[Tensor] | None:
    """The indices, if each is an integer tensor and at least one has no dimensions."""
    items = index if isinstance(index, tuple) else (index,)
    if not items or not all(isinstance(item, Tensor) and item.dtype in INTEGERS for item in items):
        return None
    return list(items) if any(item.dim() == 0 for item in items) else None


def has_dtype(args: Any, kwargs: Any) -> bool:
    return any(isinstance(item, torch.dtype) for item in (*args, *kwargs.values()))


def widened(item: Any) -> Any:
    return torch.float64 if isinstance(item, torch.dtype) and item in NARROW else item


def detached(item: Any) -> Any:
    real = isinstance(item, Tensor) and (item.is_floating_point() or item.is_complex())
    return item.detach() if real else item


# -- custom autograd functions ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def custom_functions(here: Callable[[], Origin]) -> Iterator[None]:
    """While tracing, `Function.apply` is refused where it would have a backward: tracing would forget that."""
    base = torch.autograd.Function
    original = base.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            return args[0](*args[2:])
        learning = any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves((args, kwargs)))
        harmless = cls.__module__.startswith("torch.utils.checkpoint") or cls.__name__.startswith("GeneratedBackwardFor_")
        if learning and torch.is_grad_enabled() and not harmless:
            raise refused(cls, here())
        return original.__get__(None, cls)(*args, **kwargs)

    base.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        base.apply = original  # type: ignore[method-assign]


def refused(cls: type, origin: Origin) -> Unsupported:
    if cls.__module__.startswith("torch._higher_order_ops"):
        name = cls.__module__.rpartition(".")[2]
        return Unsupported(f"`torch.{name}` is not captured", origin, "E123")
    if cls.__name__ == "BackwardHookFunction":
        return Unsupported("a module has backward hooks", origin, "E126")
    return Unsupported(f"the autograd function `{cls.__name__}` has a backward of its own", origin, "E126")


# -- where ------------------------------------------------------------------------------------------------------------


def running_line(paths: dict[int, str]) -> Origin:
    """The innermost running line of the user's code (else of a library that is not torch), and its module's path."""
    frame = sys._getframe(1)
    best: tuple[str, int] | None = None
    module = None
    while frame is not None and frame.f_code.co_filename != TOP:
        file = frame.f_code.co_filename
        mine = frame.f_locals.get("self")
        if module is None and isinstance(mine, nn.Module):
            module = paths.get(id(mine))
        if not is_installed(file):
            best = file, frame.f_lineno
            break
        if best is None and not is_torch(file) and not is_own(file):
            best = file, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    if best is None:
        return Origin(module or "")
    return Origin(module or "", f"{shown(best[0])}:{best[1]}", code_at(*best))
