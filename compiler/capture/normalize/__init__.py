"""Normalization: the many spellings of one thing become one, so that later stages see few kinds of operators.

    before:  %u : float32[8, 4, 1, 16] = aten.unsqueeze.default(%x, -2)
             %d, %mask = aten.native_dropout.default(%u, 0.1, True)
    after:   %u : float32[8, 4, 1, 16] = aten.view.default(%x, [8, 4, 1, 16])
             %d : float32[8, 4, 1, 16] = planc.dropout(%u, 0.1, 0)

Reshapes become `view` with the sizes written out, transposes `permute`, splits `slice`, casts `planc.cast`, creations
`full` or `arange.start_step`, dropout and attention planc's own operators; copies and views that change nothing vanish;
dimensions and bounds count from the front; arguments that name devices or layouts are dropped. Each rewrite keeps
eager's meaning exactly. A handler for an operator is a function in one of this package's modules.
"""

from __future__ import annotations

from typing import Any

from compiler.capture.normalize import arithmetic, attention, creation, randomness, refused, views  # noqa: F401  (they register)
from compiler.capture.normalize.builder import HANDLERS, Builder
from compiler.capture.normalize.masks import recognize_masks
from compiler.ir.graph import Graph, Value


def normalize(graph: Graph, constants: dict[str, Any]) -> Graph:
    """The same program in the normal form. Raises Unsupported."""
    builder = Builder(graph)
    for node in graph.nodes:
        results = builder.normalized(node)
        for old, new in zip(node.outputs, results):
            if old is not None:
                builder.env[old] = new
    made: Graph = builder.graph
    given = set(made.inputs)
    for role, value in graph.outputs.items():
        new: Value = builder.env[value]
        made.outputs[role] = builder.copied(new) if new in given else new
    recognize_masks(made, constants)
    made.remove_dead()
    return made


__all__ = ["HANDLERS", "normalize"]
