"""What a choice of layouts costs over the tensor axes: communication, and work and memory that it leaves undivided.

All in one unit, elements that one rank sends. What is sent is read off the redistributions that propagation made
(`communication.py`), forward and backward. What is not divided has a price, since dividing is what tensor parallelism
is asked for:

    work      a multiply-add that more ranks do than need to:  WHOLE_WORK elements
    memory    an element of a weight that more ranks hold than need to:  WHOLE_WEIGHT elements

By these prices the weights of any layer with more than some tens of features are cut, and those left whole for which
the communication would be out of proportion: adapters of low rank, gates of few experts, small tables.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from compiler.analysis.flops import flops
from compiler.ir.graph import Graph, Node, Value
from compiler.layout.placement import Layout, Mesh, V, local_shape
from compiler.layout.rule import Dims, rule_of
from compiler.tensor.communication import Cost, elements_without
from runtime.transport.calls import sent_bytes

WHOLE_WORK = 1 / 8
"""Some hundred times what it is on hardware, where a multiply-add takes about 1/1000 of the time of an element on a
fast link: so narrow layers are divided too, as the plan asks, and wide ones only more so."""
WHOLE_WEIGHT = 16
"""A weight is kept with its gradient and the optimizer's state, for the whole step. At this price a table of v rows is
divided unless a micro-batch has more than 8 v tokens."""


def undivided_work(graph: Graph, mesh: Mesh, axes: Collection[str]) -> Cost:
    """The price of products (of matrices, convolutions, attention) that ranks do in common, and of those in which they
    use a weight in common, though for other tokens: the weight is what is to be divided."""
    weights, total = {value for value in graph.inputs if value.kind == "param"}, 0.0
    for node in graph.nodes:
        own = [value for value in node.inputs if value in weights]
        if own and len(own) == len(node.inputs) and (rule_of(node).cheap or node.op.startswith("planc.")):
            weights.update(out for out in node.outputs if out is not None)
        elif whole := multiply_adds(node, mesh, axes):
            values = own or [*node.inputs, *filter(None, node.outputs)]
            total += whole * max(0.0, min(part(value, mesh, axes) for value in values) - even(mesh, axes))
    return Cost(round(total * WHOLE_WORK))


def multiply_adds(node: Node, mesh: Mesh, axes: Collection[str]) -> float:
    """Of a node's products, on a rank that has its part on the other axes and all of these: for each element of the
    result, what is summed over."""
    out = node.outputs[0]
    if out is None or len(node.inputs) < 2:
        return 0.0
    counted = flops(node.op, node.args, node.outputs) / 2
    elements = elements_without(out, mesh, axes)
    if counted:
        return counted * elements / math.prod(out.shape)
    rule = rule_of(node)
    kept = names_in(dims for dims in rule.results if dims is not None)
    summed = [names_in([dims]) - kept for dims in rule.operands]
    paired = [each for k, each in enumerate(summed) if any(each & other for j, other in enumerate(summed) if j != k)]
    return elements * min(math.prod(rule.sizes[name] for name in each) for each in paired) if paired else 0.0


def names_in(every: Iterable[Dims]) -> set[str]:
    return {name for dims in every for names in dims for name in names}


def undivided_memory(stored: Iterable[tuple[Value, Layout]], mesh: Mesh, axes: Collection[str]) -> Cost:
    """The price of weights stored so that ranks hold elements in common."""
    total = 0.0
    for value, layout in stored:
        held = Value(value.name, value.dtype, value.shape, layout=layout)
        total += math.prod(value.shape) * max(0.0, part(held, mesh, axes) - even(mesh, axes))
    return Cost(round(total * WHOLE_WEIGHT))


def reduced_gradients(stored: Iterable[tuple[Value, Layout]], mesh: Mesh, axes: Collection[str]) -> Cost:
    """What the reduction of weights' gradients sends over axes on which the weight is used in work that differs."""
    total = Cost()
    for value, layout in stored:
        over = [axis for axis in axes if layout[axis] == V]
        if over and value.differentiable:
            ways = math.prod(mesh.size(axis) for axis in over)
            total += Cost(sent_bytes("all_reduce", ways, math.prod(local_shape(value.shape, layout, mesh))), 1)
    return total


def part(value: Value, mesh: Mesh, axes: Collection[str]) -> float:
    """The share of a value that a rank of the axes holds, padding included."""
    whole = math.prod(value.shape)
    layout = Layout((axis, place) for axis, place in (value.layout or Layout()).items() if axis in axes)
    return math.prod(local_shape(value.shape, layout, mesh)) / whole if whole else 1.0


def even(mesh: Mesh, axes: Collection[str]) -> float:
    return 1 / math.prod(mesh.size(axis) for axis in axes)
