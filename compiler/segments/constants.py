"""Constants: what depends on no parameter, yet is computed once for all segments, becomes a segment of its own.

Rotary tables, masks and positions are made in front of the layers, beside the embedding. In a segment of their own they
need not be sent from pipeline stage to pipeline stage: each stage that needs them can compute them itself.

before:  begin (tokens, table):  x = embedding(tokens, table);  cos = …(positions);  mask = …(tokens)
after:   begin.constants (tokens):  cos = …(positions);  mask = …(tokens)
         begin (tokens, table):     x = embedding(tokens, table)
"""

from __future__ import annotations

from collections.abc import Sequence

from compiler.ir.graph import Graph, live
from compiler.segments.split import Segment, connect

AT_HAND = ("batch", "buffer", "constant", "hoisted")
"""Kinds of graph inputs that every rank has, but for parameters."""


def separate_constants(graph: Graph, segments: Sequence[Segment]) -> list[Segment]:
    """The segments, each with what others read of its constants in a segment in front of it."""
    free = {value for value in graph.inputs if value.kind in AT_HAND}
    for node in graph.nodes:
        if all(value in free for value in node.inputs) and not node.op.startswith("planc.opaque"):
            free.update(out for out in node.outputs if out is not None)
    found: list[Segment] = []
    for segment in segments:
        shared = [value for value in segment.outputs if value in free and value not in graph.outputs.values()]
        moved = live(segment.nodes, shared)
        rest = [node for node in segment.nodes if node not in moved]
        if moved and rest:
            found.append(Segment(f"{segment.name}.constants", "", moved))
            found.append(Segment(segment.name, segment.unit, rest))
        else:
            found.append(segment)
    connect(graph, found)
    return found
