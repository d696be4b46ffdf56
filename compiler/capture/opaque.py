"""Opaque modules: captured as one operator, without looking inside.

While the model is traced, the forward of such a module is replaced by a call of `planc_capture::opaque`, a custom
operator that is told the types of its results. They are learned by running the module on its own: on fake tensors, or,
where it looks at values, on real ones of 2 and of 3 rows, which shows which dimensions are the batch.

    planc.opaque("experts", [%x], [%experts.w, %experts.b], "{…}")

The module's parameters and buffers are operands, so they are trained like all others; the last argument describes the
call for `runtime.opaque.call_opaque`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from compiler.capture.failures import Unsupported, first_line, innermost
from compiler.ir.graph import Origin
from runtime.opaque import OpaqueError, describe, run_on, tensors_of

OPERATOR = "planc_capture.opaque.default"
CALL = nn.Module.__call__
"""How modules are called when nobody traces them."""
_LIBRARY = torch.library.Library("planc_capture", "DEF")
_LIBRARY.define("opaque(Tensor[] inputs, Tensor[] state, str path, str call, str results) -> Tensor[]")


@torch.library.register_fake("planc_capture::opaque", lib=_LIBRARY)
def _fake(inputs: list[Tensor], state: list[Tensor], path: str, call: str, results: str) -> list[Tensor]:
    return [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in json.loads(results)]


@dataclass(frozen=True)
class Type:
    """The type of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Type:
        return Type(tuple(tensor.shape), tensor.dtype)

    def filled(self) -> Tensor:
        """Small numbers, all valid as positions."""
        if self.dtype.is_floating_point:
            return torch.randn(self.shape, dtype=self.dtype)
        return torch.zeros(self.shape, dtype=self.dtype)

    def rows(self, old: int, new: int) -> Type:
        """With another number of rows, if the first dimension is the batch."""
        return Type((new, *self.shape[1:]), self.dtype) if self.shape[:1] == (old,) else self


@contextlib.contextmanager
def replaced(model: nn.Module, paths: Sequence[str], rows: int | None) -> Iterator[None]:
    """The modules at `paths` are called through the operator. `rows` is the size of the batch, if known."""
    modules = {path: model.get_submodule(path) for path in paths}
    for path, module in modules.items():
        if "forward" in vars(module):
            raise Unsupported(f"`{path}` has a forward of its own instance", Origin(path), "E128")
        vars(module)["forward"] = _Forward(path, module, rows)
    try:
        yield
    finally:
        for module in modules.values():
            del vars(module)["forward"]


def runs_as_it_is(module: nn.Module) -> bool:
    """Whether the module is replaced now."""
    return isinstance(vars(module).get("forward"), _Forward)


class _Forward:
    """Stands for a module's forward."""

    def __init__(self, path: str, module: nn.Module, rows: int | None):
        self.path, self.module, self.batch = path, module, rows
        self.original = type(module).forward
        self.state = [*dict(module.named_parameters()), *dict(module.named_buffers())]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        held = [tensors[name] for name in self.state]
        try:
            _, inputs = describe(args, kwargs, self.state, ())
        except OpaqueError as error:
            raise Unsupported(f"`{self.path}` cannot be opaque: {error}", Origin(self.path), "E128") from error
        learned = self.learn(args, kwargs, [Type.of(x) for x in held])
        call, _ = describe(args, kwargs, self.state, learned.changed)
        types = [*learned.results, *(Type.of(tensors[name]) for name in learned.changed)]
        results = json.dumps([[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in types])
        made = torch.ops.planc_capture.opaque(inputs, held, self.path, call, results)
        for name, value in zip(learned.changed, made[len(learned.results) :]):
            tensors[name].copy_(value)
        leaves = iter(made)
        return pytree.tree_unflatten(
            [next(leaves) if isinstance(leaf, Tensor) else leaf for leaf in learned.leaves], learned.tree
        )

    def learn(self, args: Any, kwargs: Any, state: Sequence[Type]) -> _Learned:
        """What the module returns for arguments of these types. It runs as it is: without the plan's autocast."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        types = [Type.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with (
            _disable_current_modes(), torch._C.DisableTorchFunction(), torch.random.fork_rng(devices=[]),
            torch.autocast("cpu", enabled=False),
        ):  # fmt: skip
            try:
                with FakeTensorMode(allow_non_fake_inputs=True):
                    return self.run(types, tree, state)
            except Unsupported:
                raise
            except Exception:
                return self.learn_on_values(types, tree, state)

    def learn_on_values(self, types: Sequence[Any], tree: Any, state: Sequence[Type]) -> _Learned:
        try:
            old = self.batch
            if old is None or not any(isinstance(t, Type) and t.shape[:1] == (old,) for t in types):
                return self.run(types, tree, state)
            two, three = (
                self.run([t.rows(old, n) if isinstance(t, Type) else t for t in types], tree, state) for n in (2, 3)
            )
            return _Learned(two.leaves, two.tree, self.scaled(two, three, old), two.changed)
        except Unsupported:
            raise
        except Exception as error:
            place = innermost(error)
            origin = Origin(self.path, f"{place[0]}:{place[1]}" if place else "")
            what = f"`{self.path}` fails when it is run by itself: {type(error).__name__}: {first_line(error)}"
            raise Unsupported(what, origin, "E128") from error

    def run(self, types: Sequence[Any], tree: Any, state: Sequence[Type]) -> _Learned:
        args, kwargs = pytree.tree_unflatten([t.filled() if isinstance(t, Type) else t for t in types], tree)
        held = {name: t.filled() for name, t in zip(self.state, state)}
        before = {name: tensor._version for name, tensor in held.items()}
        tracer, nn.Module.__call__ = nn.Module.__call__, CALL  # type: ignore[method-assign]
        del vars(self.module)["forward"]
        try:
            with _RunningStatistics() as statistics:
                returned, after = run_on(self.module, held, args, kwargs)
        finally:
            vars(self.module)["forward"] = self
            nn.Module.__call__ = tracer  # type: ignore[method-assign]
        changed = tuple(
            name
            for name, tensor in held.items()
            if after[name] is not tensor or tensor._version != before[name] or id(tensor) in statistics.written
        )
        for name in changed:
            if after[name].shape != held[name].shape:
                what = f"the forward gives the buffer `{self.path}.{name}` another shape"
                raise Unsupported(what, Origin(self.path), "E128")
        leaves, out_tree = pytree.tree_flatten(returned)
        results = tuple(Type.of(tensor) for tensor in tensors_of(returned))
        if any(isinstance(size, torch.SymInt) for t in results for size in t.shape):
            raise RuntimeError("the size of a result depends on values")
        return _Learned(tuple(leaves), out_tree, results, changed)

    def scaled(self, two: _Learned, three: _Learned, rows: int) -> tuple[Type, ...]:
        """The results' types for `rows` rows, from those for 2 and for 3."""
        found = []
        for a, b in zip(two.results, three.results):
            shape = []
            for small, large in zip(a.shape, b.shape):
                if small != large and small * 3 != large * 2:
                    what = f"a result of `{self.path}` has {small} rows for 2 samples and {large} for 3"
                    raise Unsupported(what, Origin(self.path), "E128")
                shape.append(small if small == large else small // 2 * rows)
            found.append(Type(tuple(shape), a.dtype))
        return tuple(found)


class _RunningStatistics(TorchDispatchMode):
    """Notes the tensors that batch normalization writes to: neither its signature nor their version tells."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "batch_norm" in func._schema.name and "backward" not in func._schema.name:
            named = dict(zip((argument.name for argument in func._schema.arguments), args)) | (kwargs or {})
            if named.get("training", True):
                self.written |= {id(named.get("running_mean")), id(named.get("running_var"))}
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Learned:
    """What a module returned: its leaves and their tree, the tensors' types, and the buffers that it changed."""

    leaves: tuple[Any, ...]
    tree: Any
    results: tuple[Type, ...]
    changed: tuple[str, ...]
