"""`autocast = on`: while the model is captured, each operation's dtype is chosen as torch.autocast chooses it.

The casts become part of the graph. torch has one list of operations for CPUs and a longer one for CUDA devices, which
also takes softmax, norms, sums, powers and exponentials in float32. Models are captured on (fake) CPU tensors; for a
plan whose devices are no CPUs, the rest of CUDA's list is registered for CPU tensors while its model is captured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compiler.precision import Autocast

FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity dist pdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
    upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord
    sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim
""".split()
LOWER = """
    _convolution convolution addmv addr einsum mv chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell
""".split()
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add".split()
"""What CUDA's list has besides the CPU's: taken in float32, in the lower dtype, and in the widest of the operands'."""

_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextlib.contextmanager
def autocasting(autocast: Autocast | None) -> Iterator[None]:
    """A region in which operations choose their dtype (None: as they stand).

    It encloses the tracing, and is not traced: so the casts keep the module and the line that they serve.
    """
    if autocast is None:
        yield
        return
    with torch.autocast("cpu", getattr(torch, autocast.dtype), cache_enabled=False):
        yield


@contextlib.contextmanager
def operator_lists(autocast: Autocast | None) -> Iterator[None]:
    """CPU tensors are autocast by the list of `autocast.device`, for as long as the context lasts."""
    if autocast is None or autocast.device == "cpu":
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        for names, choose in ((FLOAT32, _single), (LOWER, _lower), (WIDEST, _widest)):
            for name in names:
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA"):  # in this torch
                    library.impl(name, _kernel(name, choose), "AutocastCPU")
        yield


def _kernel(name: str, choose: Callable[[list[torch.dtype]], torch.dtype]) -> Callable[..., Any]:
    """The operator after a cast of its floating operands (as torch does, of all but float64)."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        def eligible(item: Any) -> bool:
            return isinstance(item, Tensor) and item.is_floating_point() and item.dtype != torch.float64

        dtypes = [item.dtype for item in pytree.tree_leaves((args, kwargs)) if eligible(item)]
        if dtypes:
            dtype = choose(dtypes)
            args, kwargs = pytree.tree_map(lambda item: item.to(dtype) if eligible(item) else item, (args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return operator(*args, **kwargs)

    return kernel


def _single(dtypes: list[torch.dtype]) -> torch.dtype:
    return torch.float32


def _lower(dtypes: list[torch.dtype]) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _widest(dtypes: list[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)
