"""Modules that run as they are."""

from __future__ import annotations

import json
from dataclasses import replace

from compiler.ir.graph import Node
from compiler.layout.rule import Dims, Rule, rule, whole


@rule("planc.opaque")
def opaque(node: Node) -> Rule:
    """Nothing is known of what is inside, so everything is whole; that is no lack of a rule.

    A call that was declared to treat samples independently says which of its arguments hold some: their dimension 0, and
    that of results with as many rows, is the batch, which may be cut. Parameters, and buffers that change, are whole.
    """
    rule = replace(whole(node), fallback=False)
    samples = node.kwargs.get("samples")
    if not samples:
        return rule
    inputs = node.args[1]
    cut = {inputs[k] for k in samples}
    rows = inputs[samples[0]].shape[0]
    returned = len(node.outputs) - len(json.loads(node.args[3])["changed"])

    def dims(is_batch: bool, found: Dims | None) -> Dims | None:
        return (("batch",), *found[1:]) if is_batch and found is not None else found

    return replace(
        rule,
        operands=tuple(dims(value in cut, found) for value, found in zip(node.inputs, rule.operands)),
        results=tuple(
            dims(k < returned and out is not None and out.shape[:1] == (rows,), found)
            for k, (out, found) in enumerate(zip(node.outputs, rule.results))
        ),
        sizes={**rule.sizes, "batch": rows},
    )
