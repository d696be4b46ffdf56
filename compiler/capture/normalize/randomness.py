"""Randomness: dropout in its forms becomes `planc.dropout` with a call site; there is no other source of randomness."""

from __future__ import annotations

from typing import Any

from compiler.capture.failures import Unsupported
from compiler.capture.normalize.builder import HANDLERS, Builder, Call, handler
from compiler.ir.graph import Value

RANDOM = """
    rand rand_like randn randn_like randint randint_like randperm bernoulli multinomial normal normal_functional uniform
    exponential geometric log_normal cauchy random poisson binomial rrelu rrelu_with_noise rrelu_with_noise_functional
    rrelu_with_noise_functional alpha_dropout feature_alpha_dropout _fused_dropout _sample_dirichlet _standard_gamma
""".split()


def is_random(op: str) -> bool:
    """Whether an operator draws random numbers in a way that planc cannot reproduce."""
    name = op.split(".")[1]
    return name in RANDOM or name.rstrip("_") in RANDOM


def dropped(b: Builder, x: Value, p: float) -> Value:
    """x with elements dropped with probability p."""
    if p == 0:
        return x
    if p == 1:
        return b.emit("aten.mul.Tensor", (x, 0.0), x.dtype, x.shape)  # not `full`: it has a gradient (zero) in eager
    return b.emit("planc.dropout", (x, p, b.site()), x.dtype, x.shape)


@handler("dropout.default")
def dropout(b: Builder, call: Call) -> Value:
    return dropped(b, call.x, call["p"]) if call["train"] else call.x


@handler("native_dropout.default")
def native_dropout(b: Builder, call: Call) -> list[Value | None]:
    if call.node.outputs[1] is not None:
        raise Unsupported("the mask of a dropout is used by itself", b.origin, "E121")
    train = call["train"] is None or call["train"]
    return [dropped(b, call.x, call["p"]) if train else call.x, None]


def refuse(b: Builder, call: Call) -> Any:
    name = call.node.op.split(".")[1].strip("_").removesuffix("_functional")
    if call.named.get("train") is False or call.named.get("training") is False:
        if "dropout" in name:
            return call.x
        return b.keep(call)
    if call.named.get("p") == 0 and "dropout" in name:
        return call.x
    raise Unsupported(f"`{name}` draws random numbers", b.origin, "E121")


@handler("rrelu.default")
def rrelu(b: Builder, call: Call) -> Any:
    """Without training, the slope is the mean of its bounds."""
    if call["training"]:
        return refuse(b, call)
    slope = (call["lower"] + call["upper"]) / 2
    return b.emit("aten.leaky_relu.default", (call.x, slope), call.x.dtype, call.x.shape)


@handler(*(f"{name}.{form}" for name in ("gru", "lstm", "rnn_tanh", "rnn_relu") for form in ("input", "data")))
def recurrent(b: Builder, call: Call) -> Any:
    if call["train"] and call["dropout"] > 0 and call["num_layers"] > 1:
        name = call.node.op.split(".")[1]
        raise Unsupported(
            f"the dropout between the layers of `{name}` draws random numbers", b.origin, "E121",
            help="stack single layers, with `nn.Dropout` between them",
        )  # fmt: skip
    return b.keep(call)


def _register() -> None:
    import torch

    for name in RANDOM:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            named = (f"{name}.{overload}" for overload in packet.overloads())
            handler(*(op for op in named if f"aten.{op}" not in HANDLERS))(refuse)


_register()
