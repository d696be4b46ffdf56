"""Movements of data: reshapes, transposes, broadcasts, parts."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from compiler.capture.failures import Unsupported
from compiler.capture.normalize.builder import Builder, Call, handler
from compiler.ir.graph import Value


@handler(
    "view.default", "_unsafe_view.default", "reshape.default", "flatten.using_ints", "unflatten.int",
    "squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default", "view_as.default", "reshape_as.default",
    "_reshape_alias.default", "view_copy.default", "squeeze_copy.default", "squeeze_copy.dim", "squeeze_copy.dims",
    "unsqueeze_copy.default", "ravel.default", "atleast_1d.default", "atleast_2d.default", "atleast_3d.default",
)  # fmt: skip
def reshape(b: Builder, call: Call) -> Value:
    return b.view(call.x, call.out.shape)


@handler(
    "clone.default", "contiguous.default", "alias.default", "alias_copy.default", "lift_fresh_copy.default",
    "lift_fresh.default", "lift.default", "positive.default", "resolve_conj.default", "resolve_neg.default",
    "conj_physical.default", "_conj.default", "conj.default", "real.default", "view.dtype",
)  # fmt: skip
def unchanged(b: Builder, call: Call) -> Value:
    if call.out.dtype != call.x.dtype:
        raise Unsupported(f"reading the bits of {call.x.dtype} as {call.out.dtype}", b.origin)
    return call.x


@handler("detach_.default", "detach_copy.default")
def detach(b: Builder, call: Call) -> Value:
    return b.emit("aten.detach.default", (call.x,), call.x.dtype, call.x.shape)


# -- the order of dimensions -------------------------------------------------------------------------------------------


@handler("permute.default", "permute_copy.default")
def permute(b: Builder, call: Call) -> Value:
    return b.permute(call.x, call["dims"])


@handler("t.default", "t_copy.default", "mT.default", "mH.default", "adjoint.default", "transpose.int",
         "transpose_copy.int", "swapaxes.default", "swapdims.default", "numpy_T.default", "matrix_H.default")  # fmt: skip
def transpose(b: Builder, call: Call) -> Value:
    rank = len(call.x.shape)
    order = list(range(rank))
    if call.node.op == "aten.numpy_T.default":
        return b.permute(call.x, order[::-1])
    one, other = call.args[1:3] if len(call.args) > 2 else (-2, -1)
    if rank >= 2:
        order[one], order[other] = order[other], order[one]
    return b.permute(call.x, order)


@handler("movedim.int", "movedim.intlist", "moveaxis.int", "moveaxis.intlist")
def movedim(b: Builder, call: Call) -> Value:
    rank = len(call.x.shape)
    sources, targets = ([d % rank for d in ([x] if isinstance(x, int) else x)] for x in call.args[1:3])
    stay = iter(k for k in range(rank) if k not in sources)
    return b.permute(call.x, [sources[targets.index(k)] if k in targets else next(stay) for k in range(rank)])


# -- broadcasts and repetitions ----------------------------------------------------------------------------------------


@handler("expand.default", "expand_copy.default", "expand_as.default", "broadcast_to.default")
def expand(b: Builder, call: Call) -> Value:
    return b.expand(call.x, call.out.shape)


@handler("broadcast_tensors.default", "meshgrid.default", "meshgrid.indexing")
def broadcast(b: Builder, call: Call) -> list[Value | None]:
    """`meshgrid` is a broadcast of vectors, each along its own dimension."""
    results: list[Value | None] = []
    grid = call.node.op.startswith("aten.meshgrid")
    swapped = call.named.get("indexing") == "xy" and len(call.args[0]) > 1
    for k, (x, out) in enumerate(zip(call.args[0], call.node.outputs)):
        if out is not None and grid:
            at = 1 - k if swapped and k < 2 else k
            x = b.view(x, [out.shape[at] if j == at else 1 for j in range(len(out.shape))])
        results.append(None if out is None else b.expand(x, out.shape))
    return results


@handler("repeat.default", "tile.default")
def repeat(b: Builder, call: Call) -> Value:
    """Each dimension [n] repeated r times is [1, n] expanded to [r, n]."""
    repeats = tuple(call.args[1])
    rank = max(len(repeats), len(call.x.shape))
    repeats = (1,) * (rank - len(repeats)) + repeats
    shape = (1,) * (rank - len(call.x.shape)) + call.x.shape
    apart = [size for r, n in zip(repeats, shape) for size in ((1, n) if r != 1 else (n,))]
    wide = [size for r, n in zip(repeats, shape) for size in ((r, n) if r != 1 else (n,))]
    return b.view(b.expand(b.view(call.x, apart), wide), call.out.shape)


@handler("repeat_interleave.self_int")
def repeat_interleave(b: Builder, call: Call) -> Value:
    x, repeats, dim = call.x, call["repeats"], call["dim"]
    if dim is None:
        x, dim = b.view(x, (_numel(x),)), 0
    dim %= len(x.shape)
    before, after = x.shape[: dim + 1], x.shape[dim + 1 :]
    wide = b.expand(b.view(x, (*before, 1, *after)), (*before, repeats, *after))
    return b.view(wide, call.out.shape)


# -- parts ---------------------------------------------------------------------------------------------------------------


@handler("slice.Tensor", "slice_copy.Tensor")
def slice_(b: Builder, call: Call) -> Value:
    return b.slice(call.x, call["dim"], call["start"], call["end"], call["step"])


@handler("narrow.default", "narrow_copy.default")
def narrow(b: Builder, call: Call) -> Value:
    dim = call["dim"] % len(call.x.shape)
    start = call["start"] % max(call.x.shape[dim], 1) if call["start"] < 0 else call["start"]
    return b.slice(call.x, dim, start, start + call["length"])


@handler("select.int", "select_copy.int")
def select(b: Builder, call: Call) -> Value:
    return b.select(call.x, call["dim"], call["index"])


@handler("unbind.int", "unbind_copy.int")
def unbind(b: Builder, call: Call) -> list[Value | None]:
    return [None if out is None else b.select(call.x, call["dim"], k) for k, out in enumerate(call.node.outputs)]


@handler(
    "split.Tensor", "split.sizes", "split_copy.Tensor", "split_with_sizes.default", "split_with_sizes_copy.default",
    "chunk.default", "unsafe_chunk.default", "unsafe_split.Tensor", "unsafe_split_with_sizes.default",
    "tensor_split.sections", "tensor_split.indices",
)  # fmt: skip
def split(b: Builder, call: Call) -> list[Value | None]:
    dim = call["dim"] % len(call.x.shape)
    size = call.x.shape[dim]
    ends = split_ends(call, size)
    parts = zip(call.node.outputs, [0, *ends[:-1]], ends)
    return [None if out is None else b.slice(call.x, dim, start, end) for out, start, end in parts]


def split_ends(call: Call, size: int) -> list[int]:
    """Where each part ends (results that nobody uses have no shape to ask)."""
    name, what = call.node.op.split(".")[1], call.args[1]
    if name in ("split", "split_copy", "unsafe_split") and isinstance(what, int):
        return [min(k + what, size) for k in range(0, max(size, 1), max(what, 1))]
    if name in ("chunk", "unsafe_chunk"):
        each = max(-(-size // what), 1)
        return [min(k + each, size) for k in range(0, max(size, 1), each)]
    if name == "tensor_split" and isinstance(what, int):
        small, more = divmod(size, what)
        return list(accumulate(small + (k < more) for k in range(what)))
    if name == "tensor_split":
        return [*(min(at + size if at < 0 else at, size) for at in what), size]
    return list(accumulate(what))


@handler("pad.default")
def pad(b: Builder, call: Call) -> Any:
    if call["mode"] != "constant":
        return b.keep(call)
    return padded(b, call.x, call["pad"], call["value"] or 0, call.out.shape)


@handler("constant_pad_nd.default")
def constant_pad(b: Builder, call: Call) -> Value:
    return padded(b, call.x, call["pad"], call["value"], call.out.shape)


def padded(b: Builder, x: Value, widths: tuple[int, ...], value: float, shape: tuple[int, ...]) -> Value:
    if not any(widths):
        return x
    if not x.dtype.startswith(("float", "bfloat")) and float(value).is_integer():
        value = int(value)
    return b.emit("aten.constant_pad_nd.default", (x, tuple(widths), value), x.dtype, shape)


def _numel(x: Value) -> int:
    count = 1
    for size in x.shape:
        count *= size
    return count
