"""Initial values: the model is built once on each host, and every rank takes what it holds.

A model's initialisation draws its random numbers in an order of its own, so values that are those of one device need the
whole model to be built, in one process. One rank of each host does that; it sends the model to the others of the host
in chunks of rows, of which each rank keeps its part. So a host holds the model once, beside what its ranks hold.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.factory import build
from runtime.program import Program
from runtime.state import RankState
from runtime.transport import Transport

CHUNK = 64 * 2**20
"""Bytes of a tensor that are sent at once, or a row if that is more."""

# The generator that a model's initialisation draws from is one for all threads.
_BUILDING = threading.Lock()


def initial_state(program: Program, seed: int) -> dict[str, Tensor]:
    """Full parameters and buffers as the model's own initialisation makes them under `torch.manual_seed(seed)`,
    by logical name, on the CPU."""
    with _BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(program.model["factory"], program.model["options"], program.model.get("base"))
    wanted = {p.name for p in program.parameters} | {b.name for b in program.buffers}
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach() for name, tensor in named.items() if name in wanted}


def initialise(state: RankState, transport: Transport, seed: int) -> None:
    """Fill a rank's state with what `initial_state` gives. Collective."""
    program = state.program
    hosts = transport.gather_objects(transport.host)
    groups = {host: tuple(rank for rank, its in enumerate(hosts) if its == host) for host in hosts}
    transport.prepare(groups.values())
    group = groups[transport.host]
    full = initial_state(program, seed) if transport.rank == group[0] else None
    # A model may be built in another dtype than the program keeps.
    dtypes = transport.gather_objects(dtypes_of(full) if full is not None and transport.rank == 0 else None)[0]
    for spec in (*program.parameters, *program.buffers):
        shape, dtype = tuple(spec.shape) or (1,), getattr(torch, dtypes[spec.name])
        whole = None if full is None else full.pop(spec.name).reshape(shape)
        for first, count in chunks(shape, dtype.itemsize):
            if whole is None:
                rows = torch.empty((count, *shape[1:]), dtype=dtype, device=transport.device)
            else:
                rows = whole[first : first + count].contiguous().to(transport.device)
            transport.broadcast(rows, group, group[0], label=f"initial values of {spec.name}")
            state.take(spec.name, rows, first)


def dtypes_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Their names, without "torch."."""
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}


def chunks(shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each chunk of a tensor."""
    step = max(1, CHUNK // max(1, math.prod(shape[1:]) * itemsize))
    for first in range(0, shape[0], step):
        yield first, min(step, shape[0] - first)


def initial_buffers(program: Program, seed: int, names: Sequence[str]) -> Mapping[str, Tensor]:
    """The named buffers of `initial_state`, without the memory that parameters take unless buffers depend on them: where
    the model can be built with parameters that have no data, draws no random numbers then, and all buffers have data."""
    with _BUILDING, torch.random.fork_rng(devices=[]), parameters_without_data(), Draws() as draws:
        torch.manual_seed(seed)
        try:
            model = build(program.model["factory"], program.model["options"], program.model.get("base"))
            found = {name: tensor for name, tensor in model.named_buffers() if name in names}
        except Exception:  # whatever a factory does with values that are not there
            found = {}
    if draws.any or any(tensor.device.type == "meta" for tensor in found.values()) or len(found) < len(names):
        full = initial_state(program, seed)
        return {name: full[name] for name in names}
    return found


class Draws(TorchDispatchMode):
    """Sees whether random numbers are drawn that are written anywhere."""

    any = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.any |= any(isinstance(item, Tensor) and item.device.type != "meta" for item in tree_leaves(result))
        return result


@contextmanager
def parameters_without_data() -> Iterator[None]:
    """Parameters that modules register meanwhile are on device "meta"."""

    def without_data(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta":
            return None  # a tied one stays what it is
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(without_data)
    try:
        yield
    finally:
        hook.remove()
