"""AdamW and SGD on flat buffers, with torch's own kernels.

A rank updates what it holds: one-dimensional shards, each a group with its weight decay. Both rules are elementwise, so
where the buffer is cut does not change any result. The arithmetic is that of `torch.optim` (its functional forms, with
the fused kernel on CPU and CUDA): equal to torch.optim.AdamW and torch.optim.SGD to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from runtime.devices import kind_of

_FUSED_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """name: "adamw" or "sgd". The rest as torch.optim names it, with its defaults; what the other rule uses is unused.

    lr: the peak learning rate; each step is given its own. Raises ValueError for values that torch.optim refuses too.
    """

    name: str
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    dampening: float = 0.0
    amsgrad: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        if self.name not in ("adamw", "sgd"):
            raise ValueError(f"unknown optimizer {self.name!r}; known are adamw, sgd")
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError("Nesterov momentum needs momentum > 0 and dampening = 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> OptimizerConfig:
        """From a program's optimizer entry, which also holds the options of the schedule."""
        known = {field.name for field in fields(cls)}
        chosen = {key: value for key, value in options.items() if key in known}
        if "betas" in chosen:
            chosen["betas"] = tuple(chosen["betas"])
        return cls(**chosen)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The state tensors, each of the parameter's shape, by torch.optim's names."""
        if self.name == "sgd":
            return ("momentum_buffer",) if self.momentum else ()
        return ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if self.amsgrad else ())


@dataclass(slots=True)
class ParamGroup:
    """Parameters that are updated alike.

    param: a flat shard, updated in place; may be empty. decay: its weight decay; None: the config's. lr_scale: factor
    on the learning rate. master: the shard in higher precision. If given, it is what is updated, and what the state is
    kept in; `param` receives a rounded copy.
    """

    name: str
    param: Tensor
    decay: float | None = None
    lr_scale: float = 1.0
    master: Tensor | None = None

    @property
    def target(self) -> Tensor:
        return self.param if self.master is None else self.master


class FlatOptimizer:
    """One rule over groups of flat shards.

    The state is allocated here, so that memory does not grow at the first step. Groups may be stepped together or one
    at a time; each counts its own steps. Raises ValueError for groups of one name or a master of another size.
    """

    def __init__(self, config: OptimizerConfig, groups: Sequence[ParamGroup]) -> None:
        if len({group.name for group in groups}) != len(groups):
            raise ValueError(f"groups need distinct names, got {[group.name for group in groups]}")
        for group in groups:
            if group.target.shape != group.param.shape:
                raise ValueError(f"group {group.name}: master {group.target.shape}, parameter {group.param.shape}")
        self.config = config
        self.groups = list(groups)
        self._states = [
            {name: torch.zeros_like(group.target, requires_grad=False) for name in config.state_names}
            for group in groups
        ]
        # float32, as in torch.optim; on the device, where the fused kernel reads it.
        self._steps = [torch.zeros((), dtype=torch.float32, device=group.target.device) for group in groups]
        self._taken = [0] * len(groups)

    @property
    def step_count(self) -> int:
        """The steps taken; of the group furthest ahead while a step is under way."""
        return max(self._taken, default=0)

    def step(self, lr: float, grads: Sequence[Tensor], grad_scale: float | Tensor = 1.0) -> None:
        """Update every group; `grads` in the order of the groups. See `step_group`."""
        if len(grads) != len(self.groups):
            raise ValueError(f"{len(grads)} gradients for {len(self.groups)} groups")
        for index, grad in enumerate(grads):
            self.step_group(index, lr, grad, grad_scale)

    @torch.no_grad()
    def step_group(self, index: int, lr: float, grad: Tensor, grad_scale: float | Tensor = 1.0) -> None:
        """Update one group.

        grad: of the group's shape, any floating-point dtype. grad_scale: factor on it (the clip coefficient, or one
        over the loss scale); a gradient that is scaled is scaled *in place*, as torch's clipping does.
        """
        group, target = self.groups[index], self.groups[index].target
        if grad.shape != target.shape:
            raise ValueError(f"group {group.name}: gradient {tuple(grad.shape)}, parameter {tuple(target.shape)}")
        if isinstance(grad_scale, Tensor) or grad_scale != 1.0:
            grad.mul_(grad_scale)
        grad = grad.to(target.dtype)
        lr *= group.lr_scale
        decay = self.config.weight_decay if group.decay is None else group.decay
        if self.config.name == "adamw":
            self._adamw(index, target, grad, lr, decay)
        else:
            self._sgd(index, target, grad, lr, decay)
        self._taken[index] += 1
        if group.master is not None:
            group.param.copy_(group.master)

    def _adamw(self, index: int, target: Tensor, grad: Tensor, lr: float, decay: float) -> None:
        config, state = self.config, self._states[index]
        adamw(
            [target],
            [grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [state["max_exp_avg_sq"]] if config.amsgrad else [],
            [self._steps[index]],
            fused=kind_of(target.device) in _FUSED_DEVICES,
            foreach=kind_of(target.device) not in _FUSED_DEVICES,
            amsgrad=config.amsgrad,
            beta1=config.betas[0],
            beta2=config.betas[1],
            lr=lr,
            weight_decay=decay,
            eps=config.eps,
            maximize=config.maximize,
        )

    def _sgd(self, index: int, target: Tensor, grad: Tensor, lr: float, decay: float) -> None:
        config = self.config
        sgd(
            [target],
            [grad],
            [self._states[index].get("momentum_buffer")],
            fused=kind_of(target.device) in _FUSED_DEVICES,
            foreach=kind_of(target.device) not in _FUSED_DEVICES,
            weight_decay=decay,
            momentum=config.momentum,
            lr=lr,
            # torch's first step sets the buffer to the gradient, undampened: the same as this on our zero buffer.
            dampening=config.dampening if self._taken[index] else 0.0,
            nesterov=config.nesterov,
            maximize=config.maximize,
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Group name to state name to the live tensor, of the group's shape."""
        return {group.name: dict(state) for group, state in zip(self.groups, self._states, strict=True)}

    def load_state(self, state: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Copy saved tensors in and set the step count. Raises ValueError if names or shapes differ."""
        live = self.state_tensors()
        if {group: set(tensors) for group, tensors in state.items()} != {g: set(t) for g, t in live.items()}:
            raise ValueError(f"the saved state has {_outline(state)}, the optimizer {_outline(live)}")
        for group, tensors in live.items():
            for name, tensor in tensors.items():
                if state[group][name].shape != tensor.shape:
                    raise ValueError(f"{group}/{name}: saved {state[group][name].shape}, here {tensor.shape}")
        for group, tensors in live.items():
            for name, tensor in tensors.items():
                tensor.copy_(state[group][name])
        self.set_step(step)

    def set_step(self, step: int) -> None:
        """Set the step count alone, where the tensors were filled in place."""
        for counter in self._steps:
            counter.fill_(step)
        self._taken = [step] * len(self.groups)


def _outline(state: Mapping[str, Mapping[str, Tensor]]) -> str:
    return ", ".join(f"{group}/{name}" for group, tensors in state.items() for name in tensors) or "nothing"


# -- norms -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def local_square_sum(grads: Sequence[Tensor], norm: float = 2.0) -> Tensor:
    """This rank's share of the gradient norm: Σ|g|^norm, or max |g| for norm = inf; a float64 scalar.

    Shares add up over ranks (take the maximum for inf); the norm is then `sum ** (1 / norm)`. 16-bit gradients are
    summed in float32. No gradients give 0, on the CPU.
    """
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    norms = [
        torch.linalg.vector_norm(grad, norm, dtype=torch.promote_types(grad.dtype, torch.float32)).double()
        if grad.numel()
        else torch.zeros((), dtype=torch.float64, device=grad.device)
        for grad in grads
    ]
    stacked = torch.stack(norms)
    return stacked.max() if norm == float("inf") else stacked.pow_(norm).sum()


@torch.no_grad()
def clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """The factor on every gradient so that their norm is at most `max_norm`: torch.nn.utils.clip_grad_norm_'s."""
    return (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
