"""The passes between capture and layouts, in order."""

from __future__ import annotations

from collections.abc import Sequence

from compiler.context.heads import ExpandHeads
from compiler.context.layouts import tensor_ways, ulysses_ways
from compiler.dsl.plan import Plan
from compiler.passes.base import Pass
from compiler.passes.detach_outputs import DetachOutputs
from compiler.passes.forward_only import ForwardOnly
from compiler.passes.lower_batch_norm import LowerBatchNorm
from compiler.passes.lower_embedding import LowerEmbedding
from compiler.passes.lower_index import LowerIndex
from compiler.passes.lower_losses import LowerLosses
from compiler.passes.lower_mean import LowerMean
from compiler.passes.mark_per_sample import MarkPerSample


def lowering(plan: Plan) -> Sequence[Pass]:
    """Operators that hide a reduction over the batch become ones whose reductions layouts can see."""
    local = tuple(pattern.text for pattern in plan.local_statistics)
    heads = ExpandHeads(ulysses_ways(plan), tensor_ways(plan))
    first = (ForwardOnly(), heads) if plan.mode == "forward" else (heads,)
    return (*first, MarkPerSample(plan.per_sample), LowerEmbedding(), LowerBatchNorm(local), LowerLosses(), LowerMean(), LowerIndex(), DetachOutputs())
