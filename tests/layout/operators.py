"""Example calls of every operator with a rule, at random sizes: `CALLS[name](pick) -> (op, args, kwargs)`.

Tensors among the arguments become inputs of a graph; those that require gradients are compared in their gradients.
`pick(low, high)` draws a size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Pick = Callable[[int, int], int]
Call = tuple[str, tuple[Any, ...], dict[str, Any]]
CALLS: dict[str, Callable[[Pick], Call]] = {}


def call(name: str) -> Callable[[Callable[[Pick], Any]], Callable[[Pick], Any]]:
    """Register a function that answers (op, *args), or (op, *args, {kwargs})."""

    def register(function: Callable[[Pick], Any]) -> Callable[[Pick], Any]:
        def made(pick: Pick) -> Call:
            op, *args = function(pick)
            kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
            return op, tuple(args), kwargs

        assert name not in CALLS, name
        CALLS[name] = made
        return function

    return register


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def positive(*shape: int) -> Tensor:
    return (torch.rand(shape, dtype=torch.float64) + 0.1).requires_grad_()


def unit(*shape: int) -> Tensor:
    """In (0, 1), away from the ends."""
    return (torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()


def constant(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def whole(high: int, *shape: int) -> Tensor:
    """Integers below `high`."""
    return torch.randint(high, shape)


def flags(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.5


def dims(pick: Pick, low: int = 1, high: int = 3) -> tuple[int, ...]:
    return tuple(pick(1, 6) for _ in range(pick(low, high)))


def broadcast(pick: Pick, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to this one."""
    shape = shape[pick(0, len(shape)) :]
    return tuple(1 if pick(0, 3) == 0 else size for size in shape)


def dim_of(pick: Pick, shape: tuple[int, ...]) -> int:
    return pick(-len(shape), len(shape) - 1)


# -- pointwise -------------------------------------------------------------------------------------------------------

for _name in """
    abs acosh angle asinh atan ceil celu cos cosh deg2rad elu erf erfc exp exp2 expm1 floor frac gelu hardshrink
    hardsigmoid hardswish hardtanh isfinite isnan leaky_relu log_sigmoid logit_ neg nan_to_num rad2deg relu relu6 round
    selu sgn sigmoid sign sin sinh softplus softshrink square tan tanh trunc silu mish clone alias detach sinc
    """.split():

    @call(_name)
    def _unary(pick: Pick, name: str = _name):
        if name == "logit_":
            return "aten.logit.default", unit(*dims(pick))
        return f"aten.{name}.default", positive(*dims(pick)) + 1 if name == "acosh" else real(*dims(pick))


for _name in "log log10 log1p log2 reciprocal rsqrt sqrt lgamma digamma".split():

    @call(_name)
    def _positive(pick: Pick, name: str = _name):
        return f"aten.{name}.default", positive(*dims(pick))


for _name in "add sub rsub mul atan2 fmax fmin maximum minimum hypot copysign logaddexp max_other".split():

    @call(_name)
    def _binary(pick: Pick, name: str = _name):
        op = {"max_other": "aten.max.other", "add": "aten.add.Tensor", "sub": "aten.sub.Tensor"}.get(name)
        form = "Tensor" if name in ("rsub", "mul", "copysign") else "default"
        shape = dims(pick, 0)
        other = real(*broadcast(pick, shape))
        return op or f"aten.{name}.{form}", *((real(*shape), other) if pick(0, 1) else (other, real(*shape)))


for _name in "add sub rsub mul div pow fmod remainder eq lt ge".split():

    @call(f"{_name} of a number")
    def _with_number(pick: Pick, name: str = _name):
        form = "Tensor_Scalar" if name == "pow" else "Scalar"
        return f"aten.{name}.{form}", real(*dims(pick)), pick(1, 3)


@call("add of a number as tensor")
def _add_number(pick: Pick):
    return "aten.add.Tensor", real(*dims(pick)), 2.5


@call("add with alpha")
def _add_alpha(pick: Pick):
    shape = dims(pick)
    return "aten.add.Tensor", real(*shape), real(*broadcast(pick, shape)), {"alpha": 3}


@call("div")
def _div(pick: Pick):
    shape = dims(pick)
    return "aten.div.Tensor", real(*shape), positive(*broadcast(pick, shape))


@call("div rounded")
def _div_mode(pick: Pick):
    shape = dims(pick)
    return "aten.div.Tensor_mode", real(*shape), positive(*broadcast(pick, shape)), {"rounding_mode": "floor"}


@call("pow of tensors")
def _pow(pick: Pick):
    shape = dims(pick)
    return "aten.pow.Tensor_Tensor", positive(*shape), real(*broadcast(pick, shape))


@call("multiplied with itself")
def _square(pick: Pick):
    value = real(*dims(pick))
    return "aten.mul.Tensor", value, value


@call("added to itself")
def _twice(pick: Pick):
    value = real(*dims(pick))
    return "aten.add.Tensor", value, value


@call("where")
def _where(pick: Pick):
    shape = dims(pick)
    return "aten.where.self", flags(*broadcast(pick, shape)), real(*shape), real(*broadcast(pick, shape))


@call("where with a number")
def _where_number(pick: Pick):
    shape = dims(pick)
    return "aten.where.ScalarOther", flags(*broadcast(pick, shape)), real(*shape), 2.0


@call("masked_fill")
def _masked_fill(pick: Pick):
    shape = dims(pick)
    return "aten.masked_fill.Scalar", real(*shape), flags(*broadcast(pick, shape)), float(pick(0, 1))


@call("clamp")
def _clamp(pick: Pick):
    return "aten.clamp.default", real(*dims(pick)), -0.5, 0.5


@call("clamp by tensors")
def _clamp_tensor(pick: Pick):
    shape = dims(pick)
    return "aten.clamp.Tensor", real(*shape), real(*broadcast(pick, shape))


for _name in "addcmul addcdiv".split():

    @call(_name)
    def _ternary(pick: Pick, name: str = _name):
        shape = dims(pick)
        return f"aten.{name}.default", real(*shape), real(*broadcast(pick, shape)), positive(*broadcast(pick, shape))


@call("lerp")
def _lerp(pick: Pick):
    shape = dims(pick)
    return "aten.lerp.Tensor", real(*shape), real(*shape), unit(*shape)


@call("logical_and")
def _logical(pick: Pick):
    shape = dims(pick)
    return "aten.logical_and.default", flags(*shape), flags(*broadcast(pick, shape))


@call("cast")
def _cast(pick: Pick):
    return "planc.cast", real(*dims(pick)), "torch.float64"


@call("cast of integers")
def _cast_integers(pick: Pick):
    return "planc.cast", whole(9, *dims(pick)), "torch.float64"


@call("dropout")
def _dropout(pick: Pick):
    return "planc.dropout", real(*dims(pick)), 0.3, 0


@call("prelu")
def _prelu(pick: Pick):
    shape = dims(pick, 2)
    return "aten.prelu.default", real(*shape), real(shape[1] if pick(0, 1) else 1)


@call("isin")
def _isin(pick: Pick):
    return "aten.isin.Tensor_Tensor", whole(4, *dims(pick)), whole(4, pick(1, 4))


@call("bucketize")
def _bucketize(pick: Pick):
    return "aten.bucketize.Tensor", constant(*dims(pick)), torch.arange(-1.0, 2.0, dtype=torch.float64)


# -- views -----------------------------------------------------------------------------------------------------------


@call("view")
def _view(pick: Pick):
    """Factors regrouped at random."""
    factors = [pick(1, 4) for _ in range(pick(1, 4))]

    def grouped() -> tuple[int, ...]:
        shape, at = [], 0
        while at < len(factors):
            count = pick(1, len(factors) - at)
            shape.append(math.prod(factors[at : at + count]))
            at += count
        return tuple(shape)

    return "aten.view.default", real(*grouped()), grouped()


@call("view without common factors")
def _view_odd(pick: Pick):
    a, b, c = pick(1, 4), pick(1, 4), pick(1, 3)
    return "aten.view.default", real(c, a, b), (c * b, a)


@call("unsqueeze")
def _unsqueeze(pick: Pick):
    shape = dims(pick)
    return "aten.unsqueeze.default", real(*shape), pick(-len(shape) - 1, len(shape))


@call("squeeze")
def _squeeze(pick: Pick):
    return "aten.squeeze.default", real(pick(2, 4), 1, pick(1, 4))


@call("flatten")
def _flatten(pick: Pick):
    return "aten.flatten.using_ints", real(pick(1, 4), pick(1, 4), pick(1, 4)), pick(0, 1), pick(1, 2)


@call("unflatten")
def _unflatten(pick: Pick):
    a, b = pick(1, 4), pick(1, 4)
    return "aten.unflatten.int", real(pick(1, 4), a * b), 1, (a, b)


@call("expand")
def _expand(pick: Pick):
    shape = dims(pick)
    return "aten.expand.default", real(*broadcast(pick, shape)), shape


@call("permute")
def _permute(pick: Pick):
    order = ((0, 2, 1), (2, 0, 1), (1, 0, -1), (-1, 1, 0))[pick(0, 3)]
    return "aten.permute.default", real(*dims(pick, 3)), order


@call("transpose")
def _transpose(pick: Pick):
    shape = dims(pick, 2)
    return "aten.transpose.int", real(*shape), dim_of(pick, shape), dim_of(pick, shape)


@call("t")
def _t(pick: Pick):
    return "aten.t.default", real(*dims(pick, 1, 2))


@call("movedim")
def _movedim(pick: Pick):
    return "aten.movedim.intlist", real(*dims(pick, 3)), (0, 2), (-1, 0)


@call("slice")
def _slice(pick: Pick):
    shape = dims(pick)
    dim = dim_of(pick, shape)
    return "aten.slice.Tensor", real(*shape), dim, pick(-2, 2), pick(1, 7), pick(1, 2)


@call("slice of a block")
def _block(pick: Pick):
    count, length = pick(1, 3), pick(1, 4)
    index = pick(0, count - 1)
    return "aten.slice.Tensor", real(pick(1, 4), count * length), -1, index * length, (index + 1) * length


@call("split")
def _split(pick: Pick):
    return "aten.split.Tensor", real(pick(1, 6), pick(1, 4)), pick(1, 3)


@call("chunk")
def _chunk(pick: Pick):
    return "aten.chunk.default", real(pick(1, 4), 6), pick(1, 3), -1


@call("select")
def _select(pick: Pick):
    shape = dims(pick)
    return "aten.select.int", real(*shape), dim_of(pick, shape), -1


@call("unbind")
def _unbind(pick: Pick):
    return "aten.unbind.int", real(*dims(pick, 2)), pick(0, 1)


@call("cat")
def _cat(pick: Pick):
    a, b = pick(1, 4), pick(1, 4)
    return "aten.cat.default", (real(pick(1, 4), a, b), real(pick(1, 4), a, b)), 0


@call("cat of equal parts")
def _cat_equal(pick: Pick):
    shape = dims(pick)
    return "aten.cat.default", tuple(real(*shape) for _ in range(pick(1, 3))), dim_of(pick, shape)


@call("stack")
def _stack(pick: Pick):
    shape = dims(pick)
    return "aten.stack.default", tuple(real(*shape) for _ in range(pick(1, 3))), pick(0, len(shape))


@call("constant_pad_nd")
def _pad(pick: Pick):
    amounts = (pick(-1, 2), pick(0, 2), 0, pick(0, 1))
    return "aten.constant_pad_nd.default", real(pick(2, 4), pick(1, 4), pick(2, 4)), amounts, float(pick(0, 1))


@call("pad")
def _pad_mode(pick: Pick):
    return "aten.pad.default", real(2, pick(2, 4), pick(2, 4)), (1, 1), "reflect"


for _name in ("tril", "triu"):

    @call(_name)
    def _triangle(pick: Pick, name: str = _name):
        return f"aten.{name}.default", real(*dims(pick, 2)), pick(-1, 1)


@call("flip")
def _flip(pick: Pick):
    return "aten.flip.default", real(*dims(pick, 2)), (0,)


@call("roll")
def _roll(pick: Pick):
    return "aten.roll.default", real(*dims(pick, 2)), (1,), ((1,), ())[pick(0, 1)]


@call("unfold")
def _unfold(pick: Pick):
    return "aten.unfold.default", real(pick(1, 4), pick(3, 6)), 1, 2, 1


@call("repeat")
def _repeat(pick: Pick):
    shape = dims(pick, 1, 2)
    return "aten.repeat.default", real(*shape), tuple(pick(1, 3) for _ in range(len(shape) + pick(0, 1)))


@call("repeat_interleave")
def _repeat_interleave(pick: Pick):
    shape = dims(pick)
    return "aten.repeat_interleave.self_int", real(*shape), pick(1, 3), dim_of(pick, shape)


# -- reductions ------------------------------------------------------------------------------------------------------

for _name in "sum mean amax amin logsumexp linalg_vector_norm argmax prod var any all".split():

    @call(f"{_name} over dimensions")
    def _reduce(pick: Pick, name: str = _name):
        shape = dims(pick, 1)
        over, keepdim = (dim_of(pick, shape),), bool(pick(0, 1))
        value = flags(*shape) if name in ("any", "all") else real(*shape)
        if name == "linalg_vector_norm":
            return "aten.linalg_vector_norm.default", value, 2, over, keepdim
        if name == "var":
            return "aten.var.correction", value, over, {"correction": 0, "keepdim": keepdim}
        form = {"sum": "dim_IntList", "mean": "dim", "prod": "dim_int", "any": "dim", "all": "dim"}.get(name, "default")
        single = name in ("any", "all", "argmax", "prod")
        return f"aten.{name}.{form}", value, over[0] if single else over, keepdim


for _name in "sum max min prod any all".split():

    @call(_name)
    def _reduce_all(pick: Pick, name: str = _name):
        shape = dims(pick, 0)
        return f"aten.{name}.default", flags(*shape) if name in ("any", "all") else real(*shape)


for _name in "amax amin".split():

    @call(f"{_name} of constants")
    def _extreme(pick: Pick, name: str = _name):
        shape = dims(pick)
        return f"aten.{name}.default", constant(*shape), (dim_of(pick, shape),)


@call("max over a dimension")
def _max_dim(pick: Pick):
    shape = dims(pick)
    return "aten.max.dim", real(*shape), dim_of(pick, shape)


for _name in "cumsum cumprod logcumsumexp sort topk".split():

    @call(_name)
    def _scan(pick: Pick, name: str = _name):
        shape = dims(pick)
        dim = dim_of(pick, shape)
        return (f"aten.{name}.default", real(*shape), *((1,) if name == "topk" else ()), dim)


@call("glu")
def _glu(pick: Pick):
    return "aten.glu.default", real(pick(1, 5), 2 * pick(1, 4))


@call("diff")
def _diff(pick: Pick):
    return "aten.diff.default", real(pick(1, 5), pick(2, 5))


@call("count")
def _count(pick: Pick):
    return "planc.count", real(*dims(pick, 2)), (0,)


# -- products --------------------------------------------------------------------------------------------------------


@call("mm")
def _mm(pick: Pick):
    m, k, n = pick(1, 6), pick(1, 6), pick(1, 6)
    return "aten.mm.default", real(m, k), real(k, n)


@call("bmm")
def _bmm(pick: Pick):
    b, m, k, n = pick(1, 4), pick(1, 4), pick(1, 6), pick(1, 4)
    return "aten.bmm.default", real(b, m, k), real(b, k, n)


@call("matmul")
def _matmul(pick: Pick):
    batch, m, k, n = dims(pick, 0, 2), pick(1, 4), pick(1, 6), pick(1, 4)
    left = ((k,), (m, k), (*batch, m, k))[pick(0, 2)]
    right = ((k,), (k, n), (*broadcast(pick, batch), k, n))[pick(0, 2)]
    return "aten.matmul.default", real(*left), real(*right)


@call("linear")
def _linear(pick: Pick):
    k, n = pick(1, 6), pick(1, 6)
    return "aten.linear.default", real(*dims(pick, 0, 2), k), real(n, k)


@call("linear with bias")
def _linear_bias(pick: Pick):
    k, n = pick(1, 6), pick(1, 6)
    return "aten.linear.default", real(*dims(pick, 0, 2), k), real(n, k), real(n)


@call("addmm")
def _addmm(pick: Pick):
    m, k, n = pick(1, 6), pick(1, 6), pick(1, 6)
    bias = ((n,), (1, n), (m, n), (m, 1))[pick(0, 3)]
    return "aten.addmm.default", real(*bias), real(m, k), real(k, n), {"beta": 0.5, "alpha": 2}


@call("baddbmm")
def _baddbmm(pick: Pick):
    b, m, k, n = pick(1, 4), pick(1, 4), pick(1, 6), pick(1, 4)
    return "aten.baddbmm.default", real(1, m, n), real(b, m, k), real(b, k, n)


@call("dot")
def _dot(pick: Pick):
    k = pick(1, 6)
    return "aten.dot.default", real(k), real(k)


@call("outer")
def _outer(pick: Pick):
    return "aten.outer.default", real(pick(1, 6)), real(pick(1, 6))


@call("einsum")
def _einsum(pick: Pick):
    b, i, j, k = pick(1, 4), pick(1, 4), pick(1, 4), pick(1, 4)
    forms = (
        ("bij,bjk->bik", (b, i, j), (b, j, k)),
        ("...ij,...kj->...ki", (b, i, j), (b, k, j)),
        ("bij,j", (b, i, j), (j,)),
        ("ij->j", (i, j)),
        ("ii->i", (i, i)),
        ("ij,ik,il->jkl", (i, j), (i, k), (i, b)),
    )
    equation, *shapes = forms[pick(0, len(forms) - 1)]
    return "aten.einsum.default", equation, tuple(real(*shape) for shape in shapes)


# -- indexing --------------------------------------------------------------------------------------------------------


@call("embedding")
def _embedding(pick: Pick):
    rows = pick(1, 6)
    return "aten.embedding.default", real(rows, pick(1, 6)), whole(rows, *dims(pick, 1, 2)), pick(-1, 0)


@call("one_hot")
def _one_hot(pick: Pick):
    return "aten.one_hot.default", whole(3, *dims(pick)), 3


@call("index_select")
def _index_select(pick: Pick):
    shape = dims(pick)
    dim = dim_of(pick, shape)
    return "aten.index_select.default", real(*shape), dim, whole(shape[dim], pick(1, 5))


@call("gather")
def _gather(pick: Pick):
    shape = dims(pick)
    dim = dim_of(pick, shape) % len(shape)
    index = [pick(1, size) if k == dim or pick(0, 1) else size for k, size in enumerate(shape)]
    return "aten.gather.default", real(*shape), dim, whole(shape[dim], *index)


@call("scatter")
def _scatter(pick: Pick):
    shape = dims(pick, 2)
    dim = dim_of(pick, shape) % len(shape)
    index = torch.rand(shape).argsort(dim)
    return "aten.scatter.src", real(*shape), dim, index, real(*shape)


@call("scatter_add")
def _scatter_add(pick: Pick):
    shape = dims(pick)
    dim = dim_of(pick, shape) % len(shape)
    index = [pick(1, 4) if k == dim else size for k, size in enumerate(shape)]
    return "aten.scatter_add.default", real(*shape), dim, whole(shape[dim], *index), real(*index)


@call("scatter of a number")
def _scatter_value(pick: Pick):
    shape = dims(pick)
    dim = dim_of(pick, shape)
    return "aten.scatter.value", real(*shape), dim, whole(shape[dim], *shape), float(pick(0, 1))


@call("slice_scatter")
def _slice_scatter(pick: Pick):
    a, b = pick(1, 5), pick(2, 5)
    return "aten.slice_scatter.default", real(a, b), real(a, b - 1), 1, 1, b


@call("select_scatter")
def _select_scatter(pick: Pick):
    a, b = pick(1, 5), pick(1, 5)
    return "aten.select_scatter.default", real(a, b), real(b), 0, -1


@call("index_add")
def _index_add(pick: Pick):
    a, b, n = pick(1, 5), pick(1, 5), pick(1, 5)
    return "aten.index_add.default", real(a, b), 0, whole(a, n), real(n, b)


@call("index")
def _index(pick: Pick):
    a, b, c = pick(1, 5), pick(1, 5), pick(1, 5)
    n, m = pick(1, 4), pick(1, 4)
    forms = (
        (whole(a, n),),
        (None, whole(b, n, m)),
        (whole(a, n, 1), whole(b, m)),
        (whole(a, n), None, whole(c, n)),
        (None, whole(b, n), whole(c, 1)),
    )
    return "aten.index.Tensor", real(a, b, c), forms[pick(0, len(forms) - 1)]


@call("index_put")
def _index_put(pick: Pick):
    a, b, n = pick(1, 5), pick(1, 5), pick(1, 4)
    return "aten.index_put.default", real(a, b), (whole(a, n),), real(*((n, b), (b,))[pick(0, 1)]), True


@call("index_put at several dimensions")
def _index_put_two(pick: Pick):
    a, b, c, n = pick(1, 5), pick(1, 5), pick(1, 5), pick(1, 4)
    return "aten.index_put.default", real(a, b, c), (None, whole(b, n), whole(c, n)), real(a, n), True


# -- convolutions ----------------------------------------------------------------------------------------------------


@call("conv1d")
def _conv1d(pick: Pick):
    i, o = pick(1, 5), pick(1, 5)
    return "aten.conv1d.default", real(pick(1, 4), i, 5), real(o, i, 3), real(o), (1,), (1,)


@call("conv2d")
def _conv2d(pick: Pick):
    i, o = pick(1, 5), pick(1, 5)
    bias = real(o) if pick(0, 1) else None
    return "aten.conv2d.default", real(pick(1, 4), i, 4, 5), real(o, i, 3, 2), bias, (1, 1), (1, 1)


@call("conv2d in groups")
def _conv2d_groups(pick: Pick):
    g, i, o = pick(1, 4), pick(1, 3), pick(1, 3)
    return "aten.conv2d.default", real(pick(1, 3), g * i, 4, 4), real(g * o, i, 2, 2), real(g * o), (1,), (0,), (1,), g


@call("convolution")
def _convolution(pick: Pick):
    i, o = pick(1, 4), pick(1, 4)
    return "aten.convolution.default", real(pick(1, 4), i, 5), real(o, i, 2), None, (1,), (0,), (1,), False, (0,), 1


@call("convolution, transposed")
def _convolution_transposed(pick: Pick):
    g, i, o = pick(1, 3), pick(1, 3), pick(1, 3)
    tail = ((2,), (0,), (1,), True, (0,), g)
    return "aten.convolution.default", real(pick(1, 3), g * i, 4), real(g * i, o, 2), real(g * o), *tail


@call("max_pool2d")
def _max_pool(pick: Pick):
    return "aten.max_pool2d.default", real(pick(1, 5), pick(1, 5), 4, 4), (2, 2)


@call("adaptive_avg_pool2d")
def _adaptive_pool(pick: Pick):
    return "aten.adaptive_avg_pool2d.default", real(pick(1, 5), pick(1, 5), 5, 4), (2, 1)


@call("avg_pool1d")
def _avg_pool(pick: Pick):
    return "aten.avg_pool1d.default", real(pick(1, 5), pick(1, 5), 6), (2,)


@call("upsample_nearest2d")
def _upsample(pick: Pick):
    return "aten.upsample_nearest2d.vec", real(pick(1, 5), pick(1, 5), 3, 2), None, (2.0, 2.0)


@call("upsample_bilinear2d")
def _bilinear(pick: Pick):
    return "aten.upsample_bilinear2d.default", real(pick(1, 5), pick(1, 5), 3, 2), (5, 4), False


@call("pixel_shuffle")
def _pixel_shuffle(pick: Pick):
    return "aten.pixel_shuffle.default", real(pick(1, 5), 4, 2, 3), 2


@call("grid_sampler")
def _grid_sampler(pick: Pick):
    b = pick(1, 4)
    return "aten.grid_sampler_2d.default", real(b, pick(1, 4), 3, 3), real(b, 2, 2, 2), 0, 0, False


# -- normalisations and attention ------------------------------------------------------------------------------------


@call("layer_norm")
def _layer_norm(pick: Pick):
    shape = dims(pick, 2)
    last = shape[-pick(1, len(shape) - 1) :]
    return "aten.layer_norm.default", real(*shape), last, real(*last), real(*last)


@call("layer_norm without weights")
def _layer_norm_plain(pick: Pick):
    shape = dims(pick, 2)
    return "aten.layer_norm.default", real(*shape), shape[-1:]


@call("rms_norm")
def _rms_norm(pick: Pick):
    shape = dims(pick, 2)
    return "aten.rms_norm.default", real(*shape), shape[-1:], real(shape[-1]), 1e-5


@call("group_norm")
def _group_norm(pick: Pick):
    g, c = pick(1, 4), pick(1, 3)
    return "aten.group_norm.default", real(pick(1, 4), g * c, 3), g, real(g * c), real(g * c)


@call("batch_norm in evaluation")
def _batch_norm(pick: Pick):
    c = pick(1, 5)
    args = (real(c), real(c), constant(c), constant(c).abs() + 0.1)
    return "aten.batch_norm.default", real(pick(2, 4), c, 3), *args, False, 0.1, 1e-5, False


for _name in "softmax log_softmax".split():

    @call(_name)
    def _softmax(pick: Pick, name: str = _name):
        shape = dims(pick)
        return f"aten.{name}.int", real(*shape), dim_of(pick, shape)


@call("cosine_similarity")
def _cosine(pick: Pick):
    shape = dims(pick, 2)
    return "aten.cosine_similarity.default", real(*shape), real(*shape), pick(0, 1)


@call("attention")
def _attention(pick: Pick):
    b, h, g, s, t, d = pick(1, 4), pick(1, 3), pick(1, 3), pick(1, 4), pick(1, 4), pick(1, 3)
    masks = (None, flags(s, t), flags(b, 1, s, t), real(1, h * g, s, t), real(b, h * g, 1, t), flags(1, 1, 1, t))
    mask, causal = masks[pick(0, len(masks) - 1)], False
    if mask is None and s == t:
        causal = bool(pick(0, 1))
    return "planc.attention", real(b, h * g, s, d), real(b, h, t, d), real(b, h, t, d), mask, causal, 0.7, 0.0, 0


# -- losses ----------------------------------------------------------------------------------------------------------


@call("cross_entropy of classes")
def _cross_entropy(pick: Pick):
    n, c = pick(1, 5), pick(1, 4)
    rest = dims(pick, 0, 1) if pick(0, 1) else ()
    weight = torch.rand(c, dtype=torch.float64) if pick(0, 1) else None
    return "planc.cross_entropy", real(n, c, *rest), whole(c, n, *rest), weight, pick(0, 1) - 1, 0.1 * pick(0, 1)


@call("cross_entropy of probabilities")
def _cross_entropy_soft(pick: Pick):
    n, c = pick(1, 5), pick(1, 4)
    return "planc.cross_entropy", real(n, c), constant(n, c).softmax(1), None, -100, 0.1


@call("cross_entropy of one sample")
def _cross_entropy_one(pick: Pick):
    return "planc.cross_entropy", real(3), whole(3), None, -100, 0.0


for _name in "mse_loss l1_loss smooth_l1_loss huber_loss".split():

    @call(_name)
    def _pointwise_loss(pick: Pick, name: str = _name):
        shape = dims(pick)
        return f"aten.{name}.default", real(*shape), real(*shape), 0


@call("binary_cross_entropy_with_logits")
def _bce(pick: Pick):
    shape = dims(pick)
    weights = (None, positive(*broadcast(pick, shape)).detach())
    return "aten.binary_cross_entropy_with_logits.default", real(*shape), unit(*shape).detach(), *weights, 0


# -- relatives of the above ------------------------------------------------------------------------------------------

RELATIVES: dict[str, Callable[[Pick], Any]] = {
    "_softmax": lambda pick: ("aten._softmax.default", real(pick(1, 5), pick(1, 5)), pick(0, 1), False),
    "adaptive_max_pool2d": lambda pick: (
        ("aten.adaptive_max_pool2d.default", real(pick(1, 5), pick(1, 4), 4, 3), (2, 1))
    ),
    "addbmm": lambda pick: ("aten.addbmm.default", real(2), real(pick(3, 3), 4, 5), real(3, 5, 2)),
    "addmv": lambda pick: ("aten.addmv.default", real(4), real(4, 6), real(6)),
    "addr": lambda pick: ("aten.addr.default", real(4, 6), real(4), real(6)),
    "aminmax": lambda pick: ("aten.aminmax.default", real(*dims(pick, 2)), {"dim": pick(0, 1)}),
    "argsort": lambda pick: ("aten.argsort.default", real(*dims(pick, 2)), pick(0, 1)),
    "conv_transpose2d": lambda pick: ("aten.conv_transpose2d.input", real(pick(1, 4), 4, 3, 3), real(4, 6, 2, 2)),
    "conv2d, same": lambda pick: (
        ("aten.conv2d.padding", real(pick(1, 4), 4, 4, 3), real(6, 4, 3, 3), real(6), (1,), "same")
    ),
    "conv3d": lambda pick: ("aten.conv3d.default", real(pick(1, 4), 4, 2, 2, 2), real(6, 4, 1, 2, 1)),
    "count_nonzero": lambda pick: ("aten.count_nonzero.dim_IntList", whole(2, *dims(pick, 2)), (pick(0, 1),)),
    "cummax": lambda pick: ("aten.cummax.default", real(*dims(pick, 2)), pick(0, 1)),
    "index_copy": lambda pick: ("aten.index_copy.default", real(5, 4), 0, torch.tensor([3, pick(0, 2)]), real(2, 4)),
    "index_fill": lambda pick: (
        ("aten.index_fill.int_Scalar", real(5, pick(1, 5)), 0, torch.tensor([3, 1]), float(pick(0, 1)))
    ),
    "inner": lambda pick: ("aten.inner.default", real(*dims(pick, 0, 1), 4), real(*dims(pick, 0, 2), 4)),
    "kl_div": lambda pick: ("aten.kl_div.default", real(*dims(pick, 2, 2)), constant(1).abs(), 0),
    "kthvalue": lambda pick: ("aten.kthvalue.default", real(*dims(pick, 2)), 1, pick(0, 1)),
    "mT": lambda pick: ("aten.mT.default", real(*dims(pick, 2))),
    "max_pool2d_with_indices": lambda pick: ("aten.max_pool2d_with_indices.default", real(pick(1, 5), 4, 4, 4), (2, 2)),
    "median": lambda pick: ("aten.median.dim", real(*dims(pick, 2)), pick(0, 1)),
    "mv": lambda pick: ("aten.mv.default", real(pick(1, 6), 6), real(6)),
    "native_layer_norm": lambda pick: (
        ("aten.native_layer_norm.default", real(pick(1, 5), 4), (4,), real(4), real(4), 1e-5)
    ),
    "norm": lambda pick: ("aten.norm.ScalarOpt_dim", real(*dims(pick, 2)), 2, (pick(0, 1),)),
    "numpy_T": lambda pick: ("aten.numpy_T.default", real(*dims(pick, 2))),
    "pairwise_distance": lambda pick: ("aten.pairwise_distance.default", real(pick(1, 5), 4), real(4)),
    "pixel_unshuffle": lambda pick: ("aten.pixel_unshuffle.default", real(pick(1, 5), pick(1, 3), 4, 2), 2),
    "replication_pad2d": lambda pick: (
        ("aten.replication_pad2d.default", real(pick(1, 5), pick(1, 3), 3, 2), (1, 0, 2, 1))
    ),
    "scatter_reduce": lambda pick: (
        ("aten.scatter_reduce.two", real(pick(4, 4), 4), 1, torch.rand(4, 4).argsort(1), real(4, 4), "sum")
    ),
    "std": lambda pick: ("aten.std.correction", real(pick(1, 5), 4), (1,)),
    "take_along_dim": lambda pick: ("aten.take_along_dim.default", real(pick(1, 5), 4), whole(4, 1, pick(1, 5)), 1),
    "tile": lambda pick: ("aten.tile.default", real(pick(1, 5), 4), (pick(1, 3),)),
    "upsample_linear1d": lambda pick: ("aten.upsample_linear1d.default", real(pick(1, 5), pick(1, 5), 3), (4,), True),
    "var_mean": lambda pick: ("aten.var_mean.correction", real(pick(2, 5), 4), (0,)),
    "view_as": lambda pick: ("aten.view_as.default", real(6, pick(4, 4)), constant(3, 8)),
}
for _name, _make in RELATIVES.items():
    call(_name)(_make)


# -- without a rule --------------------------------------------------------------------------------------------------


@call("an operator without a rule")
def _no_rule(pick: Pick):
    return "aten.cdist.default", real(pick(1, 5), 3), real(pick(1, 5), 3)
