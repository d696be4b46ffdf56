"""Collectives run behind products that do not need them: each becomes a start and a wait, and moves them apart.

before:  d_w = ctx.product_into(2, d_y_t, x)
         d_h = aten.mm(d_y, w)
         d_x = ctx.all_reduce(d_h, ('tp',), 'sum')
         d_n = aten.mul(d_x, n)
after:   d_h = aten.mm(d_y, w)
         d_x_work = ctx.start_all_reduce(d_h, ('tp',), 'sum')
         d_w = ctx.product_into(2, d_y_t, x)
         d_x = ctx.wait(d_x_work)
         d_n = aten.mul(d_x, n)

The start moves up over what its operand does not need, the wait down over what does not need its result, no further
than it takes to hide the communication on the plan's machine, and only if the code then holds no more memory at any time
than before and one collective's buffers. A product hides one collective. Everything else keeps its order, and so do
starts among each other: all ranks run the same code, so they issue the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from compiler.analysis.cost import communicates, dtype_of, moved_bytes, node_flops
from compiler.analysis.machine import Machine
from compiler.autodiff.partition import VIEWS
from compiler.ir.graph import Node, Value
from compiler.overlap.footprint import Footprint

COLLECTIVES = ("planc.all_reduce", "planc.all_gather", "planc.reduce_scatter", "planc.all_to_all")
STARTS = {op: op.replace("planc.", "planc.start_") for op in COLLECTIVES}
REACH = 8
"""Products that a start or a wait moves past at most: the code stays near the order in which it was recorded."""


def behind(nodes: Sequence[Node], passed: Iterable[Value], kept: Iterable[Value], machine: Machine) -> list[Node]:
    """The nodes with collectives behind products. `passed` and `kept` are as for `Footprint`."""
    order = apart(nodes)
    starts = [node for node in order if node.op in STARTS.values()]
    if not starts:
        return order
    footprint = Footprint(order, passed, kept)
    room = footprint.peak(order) + max(sum(v.nbytes for v in (node.args[0], *node.outputs)) for node in starts)
    taken: set[Node] = set()
    for start in starts:
        order = hide(order, start, taken, machine, lambda trial: footprint.peak(trial) <= room)
    return together(order)


def apart(nodes: Iterable[Node]) -> list[Node]:
    """Each collective as a start and, right behind it, a wait."""
    order: list[Node] = []
    for node in nodes:
        if node.op not in STARTS:
            order.append(node)
            continue
        (out,) = node.outputs
        assert out is not None
        handle = Value(f"{out.name}_work", out.dtype, out.shape, "work")
        order.append(Node(STARTS[node.op], node.args, node.kwargs, [handle], node.origin, node.source))
        order.append(Node("planc.wait", (handle,), {}, [out], node.origin, node.source))
    return order


def hide(
    order: list[Node], start: Node, taken: set[Node], machine: Machine, fits: Callable[[list[Node]], bool]
) -> list[Node]:
    """Move one start up, then its wait down, until products in between that are not `taken` cover the communication."""
    wait = next(node for node in order if start.outputs[0] in node.inputs)
    collective = communicates(start)
    assert collective is not None
    need = machine.communication(*collective)
    for moves in (to_first_use, above, below):
        trials = [order]
        for trial in islice(moves(order, start, wait, taken), REACH):
            if covered(trials[-1], start, wait, taken, machine) >= need:
                break
            trials.append(trial)
        order = next(trial for trial in reversed(trials) if trial is order or fits(trial))
    taken.update(fillers(order, start, wait, taken))
    return order


def covered(order: list[Node], start: Node, wait: Node, taken: set[Node], machine: Machine) -> float:
    """Seconds of the products that run meanwhile."""
    products = fillers(order, start, wait, taken)
    return sum(machine.seconds(node_flops(node), moved_bytes(node), dtype_of(node)) for node in products)


def fillers(order: list[Node], start: Node, wait: Node, taken: set[Node]) -> list[Node]:
    """The products between start and wait that hide no other collective."""
    return [n for n in order[order.index(start) : order.index(wait)] if n not in taken and node_flops(n)]


def to_first_use(order: list[Node], start: Node, wait: Node, taken: set[Node]) -> Iterator[list[Node]]:
    """The wait right before the first node that needs its result."""
    at = order.index(wait)
    first = next((k for k in range(at + 1, len(order)) if wait.outputs[0] in order[k].inputs), len(order))
    yield [*order[:at], *order[at + 1 : first], wait, *order[first:]]


def above(order: list[Node], start: Node, wait: Node, taken: set[Node]) -> Iterator[list[Node]]:
    """The start, with what it needs, moved up over ever more products."""
    at = order.index(start)
    needed, staying, passed = set(start.inputs), [], []
    for k in range(at - 1, -1, -1):
        node = order[k]
        if is_fixed(node, taken) or not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            staying.append(node)
            continue
        passed.append(node)
        if node_flops(node):
            yield [*order[:k], *staying[::-1], start, *passed[::-1], *order[at + 1 :]]


def below(order: list[Node], start: Node, wait: Node, taken: set[Node]) -> Iterator[list[Node]]:
    """The wait, with what needs it, moved down under ever more products."""
    at = order.index(wait)
    made, staying, passed = set(wait.outputs), [], []
    for k in range(at + 1, len(order)):
        node = order[k]
        if is_fixed(node, taken) or not made.isdisjoint(node.inputs):
            made.update(node.outputs)
            staying.append(node)
            continue
        passed.append(node)
        if node_flops(node):
            yield [*order[:at], *passed, wait, *staying, *order[k + 1 :]]


def is_fixed(node: Node, taken: set[Node]) -> bool:
    """What keeps its place: products that hide something, starts, and modules that run as they are."""
    return node in taken or node.op in STARTS.values() or node.op.startswith("planc.opaque")


def together(order: Sequence[Node]) -> list[Node]:
    """The inverse of `apart` for those between whose start and wait nothing is computed."""
    idle = (*VIEWS, "planc.wait", *STARTS.values())
    collective = {start: op for op, start in STARTS.items()}
    result: list[Node] = []
    for node in order:
        result.append(node)
        if node.op == "planc.wait":
            at = next(k for k, other in enumerate(result) if node.args[0] in other.outputs)
            start, inside = result[at], result[at + 1 : -1]
            if all(other.op in idle for other in inside):
                result[at:] = [
                    Node(collective[start.op], start.args, start.kwargs, node.outputs, start.origin, start.source),
                    *inside,
                ]
    return result
