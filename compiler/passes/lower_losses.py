"""lower_losses: a loss becomes one number for each element, then their sum, then a count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.ir.graph import Graph, Node, Value
from compiler.layout.rules.loss import ELEMENTWISE
from compiler.layout.rules.signature import arguments, with_arguments
from compiler.passes.lower_support import Emitter, accumulation, replace_calls

NONE, MEAN, SUM = 0, 1, 2
"""How torch numbers the reductions."""

CLASSES = tuple(f"aten.{name}.default" for name in ("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d"))


@dataclass(frozen=True)
class LowerLosses:
    """The mean of a loss over classes divides by the number of valid labels (or the sum of their weights).

    That number depends on the batch alone. So it is summed over all ranks, and for all micro-batches before the
    first: the loss over unevenly masked labels is exact.

    before:  %loss : float32[] = aten.cross_entropy_loss.default(%logits, %labels)
    after:   %loss.cross_entropy : float32[32] = planc.cross_entropy(%logits, %labels, None, -100, 0.0)
             %loss.ne : bool[32] = aten.ne.Scalar(%labels, -100)
             %loss.cast : float32[32] = planc.cast(%loss.ne, 'torch.float32')
             %loss.sum : float32[] = aten.sum.dim_IntList(%loss.cast, [0], False)
             %loss.sum1 : float32[] = aten.sum.dim_IntList(%loss.cross_entropy, [0], False)
             %loss : float32[] = aten.div.Tensor(%loss.sum1, %loss.sum)

    The entries that a likelihood (`nll_loss`) takes are read by `gather`, which works on classes that are cut.
    Other losses (`mse_loss`, `binary_cross_entropy`, …) keep their operator, with reduction "none", and are divided
    by `planc.count`.
    """

    name: str = "lower_losses"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"losses_lowered"})

    def __call__(self, graph: Graph) -> Graph:
        return replace_calls(graph, _lower)


def _lower(node: Node, emit: Emitter) -> Sequence[Value] | None:
    if node.op in CLASSES:
        return [_over_classes(node, emit)]
    if node.op in ELEMENTWISE and arguments(node)["reduction"] != NONE:
        return [_elementwise(node, emit)]
    return None


def _elementwise(node: Node, emit: Emitter) -> Value:
    op, args, kwargs = with_arguments(node, reduction=NONE)
    return _reduced(node, emit, emit(op, *args, **kwargs))


def _reduced(node: Node, emit: Emitter, each: Value, count: Value | None = None) -> Value:
    """The sum or mean of the elements' losses; `count` is what the mean divides by, by default their number."""
    reduction, out = arguments(node)["reduction"], node.outputs[0]
    assert out is not None
    if reduction == NONE:
        return each
    wide = emit.wide(each)
    result = emit.sum(wide, range(len(each.shape)))
    if reduction == MEAN:
        result = emit("aten.div.Tensor", result, count or emit.count(wide, range(len(each.shape))))
    return emit.cast(result, out.dtype)


def _over_classes(node: Node, emit: Emitter) -> Value:
    given = arguments(node)
    logits, target, weight, ignored = given["self"], given["target"], given["weight"], given["ignore_index"]
    if node.op.startswith("aten.cross_entropy"):
        args = (logits, target, weight, ignored, given["label_smoothing"])
        shape = logits.shape[:1] + logits.shape[2:] if len(logits.shape) > 1 else ()
        each = emit.node("planc.cross_entropy", args, {}, shape, logits.dtype)
    else:
        each = _picked(emit, logits, target, weight, ignored)
    probabilities = target.shape == logits.shape and target.dtype not in ("int64", "uint8")
    if given["reduction"] != MEAN or probabilities:
        return _reduced(node, emit, each)
    return _reduced(node, emit, each, _valid(emit, target, weight, ignored, accumulation(each.dtype)))


def _picked(emit: Emitter, logs: Value, target: Value, weight: Value | None, ignored: int) -> Value:
    """Minus the entry of `logs` [n, c, …] that the target names, times its class's weight; 0 for ignored ones."""
    dim = 1 if len(logs.shape) > 1 else 0
    skipped = emit("aten.eq.Scalar", target, ignored)
    classes = emit("aten.masked_fill.Scalar", target, skipped, 0)
    entries = emit("aten.gather.default", logs, dim, emit("aten.unsqueeze.default", classes, dim))
    each = emit("aten.neg.default", emit("aten.squeeze.dim", entries, dim))
    if weight is not None:
        each = emit("aten.mul.Tensor", each, emit("aten.index.Tensor", weight, (classes,)))
    return emit("aten.masked_fill.Scalar", each, skipped, 0)


def _valid(emit: Emitter, target: Value, weight: Value | None, ignored: int, dtype: str) -> Value:
    """The number of labels that count, or the sum of their classes' weights."""
    if weight is None:
        each = emit.cast(emit("aten.ne.Scalar", target, ignored), dtype)
    else:
        skipped = emit("aten.eq.Scalar", target, ignored)
        classes = emit("aten.masked_fill.Scalar", target, skipped, 0)
        each = emit("aten.index.Tensor", weight, (classes,))
        each = emit.cast(emit("aten.masked_fill.Scalar", each, skipped, 0), dtype)
    return emit.sum(each, range(len(target.shape)))
