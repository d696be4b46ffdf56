"""The reference: the user's model in eager PyTorch on one device, in float64.

Two things are put in the place of eager's own, and nothing else: dropout draws from the same position-keyed bits as
the runtime (so that it can be compared at all), and a cast to float32 that a model writes out stays in float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compiler.capture.wrapper import every_output, named_outputs
from runtime import random
from runtime.factory import build, forward_inputs, resolve
from runtime.lr import Schedule
from runtime.optimizer import OptimizerConfig
from runtime.program import Program

NARROW = (torch.float32, torch.bfloat16, torch.float16)
Loss = tuple[str, dict[str, Any]]
"""A loss function as plans name it, and its options."""


@dataclass
class Trajectory:
    """What some steps of training gave: losses and metrics by step, gradients of every step by parameter name (absent
    where eager has None), and the state after the last step."""

    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class Reference(TorchFunctionMode):
    """Keyed dropout for everything that runs under it, and with `widen` casts to float64 instead of narrower ones."""

    def __init__(self, seed: int, widen: bool = True):
        super().__init__()
        self.seed, self.widen, self.step, self.site = seed, widen, 0, 0

    def __enter__(self) -> Reference:
        """Also inside torch's own Python functions, which call others with this mode put aside."""
        functional, checkpointing = nn.functional, torch.utils.checkpoint
        self.patches = contextlib.ExitStack()
        for place, name, stand_in in (
            (functional, "dropout", self.dropout),
            (functional, "scaled_dot_product_attention", self.attention),
            (torch, "dropout", self.dropout),
            # Recomputation would draw again, and changes no result.
            (checkpointing, "_checkpoint_without_reentrant_generator", _once),
            (checkpointing, "CheckpointFunction", _JustCalls),
        ):
            self.patches.enter_context(mock.patch.object(place, name, stand_in))
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self.patches.close()

    def next_step(self, step: int) -> None:
        self.step, self.site = step, 0

    def dropped(self, x: Tensor, p: float) -> Tensor:
        mask = self.mask(tuple(x.shape), p)
        return x * mask * (1.0 / (1.0 - p))

    def mask(self, shape: tuple[int, ...], p: float) -> Tensor:
        index = random.global_index([torch.arange(size) for size in shape], shape)
        site, self.site = self.site, self.site + 1
        return random.keep_mask(index, p, random.key(self.seed, self.step, site))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("dropout", "dropout_") and func in DROPOUTS:
            return self.dropout(*args, **kwargs)
        if func is ATTENTION:
            return self.attention(*args, **kwargs)
        if not self.widen:
            return func(*args, **kwargs)
        args = tuple(self.widened(item) for item in args)
        kwargs = {key: self.widened(item) for key, item in kwargs.items()}
        if func is Tensor.float or func in (Tensor.half, Tensor.bfloat16):
            return args[0].double() if not args[0].is_complex() else func(*args, **kwargs)
        return func(*args, **kwargs)

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        return self.dropped(input, p) if p < 1.0 else torch.zeros_like(input)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Eager's own kernel, or with dropout its formula with keyed bits."""
        if dropout_p == 0.0:
            return ATTENTION(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        if attn_mask is not None:
            bool_mask = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if bool_mask else scores + attn_mask
        return self.dropped(scores.softmax(-1), dropout_p) @ value

    @staticmethod
    def widened(item: Any) -> Any:
        return torch.float64 if isinstance(item, torch.dtype) and item in NARROW else item


def _once(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _JustCalls:
    """In the place of activation checkpointing's autograd function."""

    @staticmethod
    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        return function(*args)


ATTENTION = nn.functional.scaled_dot_product_attention
DROPOUTS = {nn.functional.dropout, torch.dropout, torch.dropout_}


def run_reference(
    program: Program,
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    loss: Loss | None = None,
    frozen: Callable[[str], bool] = lambda name: False,
) -> Trajectory:
    """Train `model` (converted to float64 in place) on whole batches, as the program's optimizer would. `frozen` says
    which parameters the plan leaves untrained."""
    model.double()
    for name, parameter in model.named_parameters():
        if frozen(name):
            parameter.requires_grad_(False)
    named = dict(model.named_parameters())
    optimizer = make_optimizer(program, named)
    schedule = Schedule.from_options(program.optimizer or {}, int(program.train["steps"] or 0))
    opaque = tuple(f"{path}." for path in program.opaque)
    found = Trajectory()
    with double_by_default(), torch.enable_grad():
        for step, outputs in enumerate(run_model(program, model, batches, loss)):
            value, metrics = scalars(outputs)
            model.zero_grad(set_to_none=True)
            value.backward()
            found.losses.append(value.item())
            found.metrics.append(metrics)
            for name, parameter in named.items():
                # What an opaque module did not use this time has a gradient of zero in a program, whose instructions
                # are the same in every step.
                if parameter.grad is None and parameter.requires_grad and name.startswith(opaque):
                    parameter.grad = torch.zeros_like(parameter)
            clip(program, list(named.values()))
            found.gradients.append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
            if optimizer is not None:
                for group in optimizer.param_groups:
                    group["lr"] = schedule(step)
                optimizer.step()
    found.parameters = {name: p.detach().clone() for name, p in named.items()}
    found.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    return found


def run_forward(
    program: Program, model: nn.Module, batches: Sequence[Mapping[str, Tensor]], loss: Loss | None = None
) -> list[dict[str, Tensor]]:
    """What `model` (converted to float64 in place) returns for each whole batch, by the names of a forward-only
    program's outputs."""
    model.double().eval()
    with double_by_default(), torch.no_grad():
        return [
            {role.removeprefix("output:"): tensor.clone() for role, tensor in every_output(outputs).items()}
            for outputs in run_model(program, model, batches, loss)
        ]


def run_model(
    program: Program, model: nn.Module, batches: Sequence[Mapping[str, Tensor]], loss: Loss | None
) -> Iterator[Any]:
    """What the model, or the loss function, returns for each batch in float64; what is done with one is done before the
    next is computed."""
    function = resolve(loss[0], program.model.get("base")) if loss else None
    passed = forward_inputs(model, list(batches[0]), function is not None)
    mode = Reference(int(program.train["seed"]))
    for step, batch in enumerate(batches):
        mode.next_step(step)
        wide = {k: (v.double() if v.is_floating_point() else v).clone() for k, v in batch.items()}
        with mode:
            outputs = model(**{name: wide[name] for name in passed})
            if function is not None and loss is not None:
                outputs = function(outputs, wide, **loss[1])
        yield outputs


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    """Tensors that a model makes without a dtype are float64 meanwhile."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def make_optimizer(program: Program, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
    """torch's own optimizer for the program's options."""
    options = program.optimizer
    if options is None:
        return None
    config = OptimizerConfig.from_options(options)
    plain = {name for bucket in program.buckets for name in bucket.parameters[bucket.decayed :]}
    groups = [
        {"params": [p for n, p in named.items() if n not in plain and p.requires_grad]},
        {"params": [p for n, p in named.items() if n in plain], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None
    common = {"lr": config.lr, "weight_decay": config.weight_decay, "foreach": False}
    if config.name == "adamw":
        return torch.optim.AdamW(groups, betas=tuple(config.betas), eps=config.eps, **common)
    return torch.optim.SGD(
        groups, momentum=config.momentum, dampening=config.dampening, nesterov=config.nesterov, **common
    )


def clip(program: Program, parameters: Sequence[nn.Parameter]) -> None:
    limits = program.clip or {}
    if "grad_value" in limits:
        nn.utils.clip_grad_value_(parameters, limits["grad_value"])
    if "grad_norm" in limits:
        nn.utils.clip_grad_norm_(parameters, limits["grad_norm"])


def scalars(outputs: Any) -> tuple[Tensor, dict[str, float]]:
    """(loss, other scalar outputs by name), by the rules that capture documents."""
    named = named_outputs(outputs)
    assert named is not None, "capture took it"
    loss = named.pop("loss")
    return loss, {k: float(v.detach()) for k, v in named.items() if isinstance(v, Tensor) and v.dim() == 0}


def build_model(program: Program, seed: int) -> nn.Module:
    """The model as the runtime initialises it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(program.model["factory"], program.model["options"], program.model.get("base"))
