"""Collectives in pieces, one behind the product of another: `tensor over … { overlap = on }`.

Where no other work hides a collective (`compiler.overlap.behind`), the product that makes its operand or that reads its
result does. (n pieces leave about 1/n of the communication exposed.)

before:  whole = ctx.all_gather(x, '1:tp:1:8:1')                     # [4, 4, 16] → [4, 8, 16]
         rows = aten.reshape(whole, (32, 16))
         y = aten.mm(rows, w)
after:   _, y = ctx.gather_matmul(x, '1:tp:1:8:1', ((w,),), False, 4)

before:  z = aten.mm(h, w)
         z_1 = aten.reshape(z, (4, 8, 16))
         s = aten.add(x, z_1)
         y = ctx.reduce_scatter(s, '1:tp:1:8:1')                     # [4, 8, 16] → [4, 4, 16]
after:   y = ctx.matmul_scatter(h, w, (x,), (4,), '1:tp:1:8:1', False, 4)

before:  … y = ctx.all_reduce(s, ('tp',), 'sum')
after:   _, y = ctx.matmul_reduce(h, w, (x,), (4, 8), ('tp',), False, 4)     # with True, s is kept too
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from compiler.analysis.cost import IN_PIECES, communicates
from compiler.autodiff.partition import VIEWS, live
from compiler.ir.graph import Node, Value
from compiler.overlap.behind import STARTS
from runtime.cuts import parse_cuts

PIECES = 4
ROWS = ("planc.all_gather", "planc.reduce_scatter")
RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
GATHER, SCATTER, REDUCE = IN_PIECES
MM, ADDMM, ADD = "aten.mm.default", "aten.addmm.default", "aten.add.Tensor"


def in_pieces(nodes: Sequence[Node], kept: Collection[Value], axes: Iterable[str]) -> list[Node]:
    """The nodes, with collectives over `axes` in pieces where a product stands beside them. `kept`: what they return."""
    code = list(nodes)
    for node in nodes:
        rewrite = REWRITES.get(node.op)
        if rewrite is not None and over(axes, node):
            code = live(rewrite(_Code(code, kept), node), list(kept))
    used = {value for node in code for value in node.inputs} | set(kept)
    return [unkept(node) if node.op == GATHER and node.outputs[0] not in used else node for node in code]


def unkept(node: Node) -> Node:
    """The same gather and products without the whole value."""
    x, cut, terms, _, pieces = node.args
    return Node(GATHER, (x, cut, terms, False, pieces), {}, [None, *node.outputs[1:]], node.origin, node.source)


def over(axes: Iterable[str], node: Node) -> bool:
    """Whether a node is a collective over some of these axes alone."""
    collective = communicates(node)
    return collective is not None and set(axes).issuperset(collective[1])


class _Code:
    """Local code, who makes and who uses each value, and the collectives that are under way beside each node."""

    def __init__(self, nodes: list[Node], kept: Collection[Value]):
        self.nodes, self.kept = nodes, kept
        self.made = {out: node for node in nodes for out in node.outputs if out is not None}
        self.users: dict[Value, list[Node]] = {}
        self.beside: dict[Node, set[Node]] = {}
        under_way: dict[Value, Node] = {}
        for node in nodes:
            for value in dict.fromkeys(node.inputs):
                self.users.setdefault(value, []).append(node)
                under_way.pop(value, None)
            self.beside[node] = set(under_way.values())
            if node.op in STARTS.values():
                under_way.update((handle, node) for handle in node.outputs if handle is not None)

    def is_free(self, product: Node, node: Node) -> bool:
        """Whether a product may go where `node`, a collective, stands: it does not hide as much where it is."""
        left = self.beside[product] - self.beside[node]
        return sum(bytes_of(other) for other in left) < bytes_of(node)

    def only_for(self, value: Value, user: Node) -> bool:
        """Whether nothing but `user` needs the value."""
        return value not in self.kept and self.users.get(value) == [user]


def gathered(code: _Code, node: Node) -> list[Node]:
    """The products of all rows of a gathered value, with the gather itself."""
    (whole,), (x, cut) = node.outputs, node.args
    assert whole is not None
    at = code.nodes.index(node)
    later = set(code.nodes[at:])
    if not by_rows(node) or most_pieces(x.shape) < 2:
        return code.nodes
    all_rows = [whole]
    for user in code.users.get(whole, ()):
        if user.op in RESHAPES and user.outputs[0].shape == (math.prod(whole.shape[:-1]), whole.shape[-1]):
            all_rows.append(user.outputs[0])
    products, early = [], {}
    for rows in all_rows:
        for product in code.users.get(rows, ()):
            views = views_of(code, product.inputs, rows, later)
            if multiplies(product, rows) and code.is_free(product, node) and views is not None:
                products.append(product)
                early.update(views)
    if not products:
        return code.nodes
    terms = tuple((p.args[-1], *p.args[:-2]) for p in products)  # (factor,) or (factor, bias)
    made = [whole, *(product.outputs[0] for product in products)]
    new = Node(GATHER, (x, cut, terms, True, PIECES), {}, made, products[0].origin, products[0].source)
    rest = [other for other in code.nodes[at + 1 :] if other not in products and other not in early]
    return [*code.nodes[:at], *[other for other in code.nodes[at:] if other in early], new, *rest]


def multiplies(node: Node, rows: Value) -> bool:
    """Whether the node is `rows @ factor`, or that plus a row."""
    if node.op == MM:
        return node.args[0] is rows and node.args[1] is not rows
    plain = node.op == ADDMM and not node.kwargs and len(node.args[0].shape) == 1
    return plain and node.args[1] is rows and node.args[2] is not rows


def views_of(code: _Code, values: Iterable[Value], rows: Value, later: set[Node]) -> dict[Node, None] | None:
    """The nodes among `later` that make the values, `rows` aside, or None if they are not all views of what is there."""
    found: dict[Node, None] = {}
    for value in values:
        node = code.made.get(value)
        if value is rows or node not in later:
            continue
        below = views_of(code, node.inputs, rows, later) if node.op in VIEWS else None
        if below is None:
            return None
        found.update(below)
        found[node] = None
    return found


def scattered(code: _Code, node: Node) -> list[Node]:
    """A reduce-scatter with the product that it sums."""
    (out,), (whole, cut, *rest) = node.outputs, node.args
    assert out is not None
    zeros = bool(rest and rest[0])
    found = product_in(code, whole, node) if code.only_for(whole, node) else None
    if found is None or not by_rows(node) or most_pieces(out.shape) < 2:
        return code.nodes
    x, factor, *addends = found
    if zeros and any(len(addend.shape) == 1 for addend in addends):
        return code.nodes  # the padding would not stay zero
    arguments = (x, factor, tuple(addends), out.shape[:-2], cut, zeros, PIECES)
    new = Node(SCATTER, arguments, {}, [out], node.origin, node.source)
    return [new if other is node else other for other in code.nodes]


def reduced(code: _Code, node: Node) -> list[Node]:
    """An all-reduce with the product that it sums. The sum on this rank may have other users."""
    (out,), (whole, axes, op) = node.outputs, node.args
    assert out is not None
    found = product_in(code, whole, node) if op == "sum" else None
    if found is None or math.prod(out.shape[:-1]) < 2:
        return code.nodes
    x, factor, *addends = found
    keep, place = not code.only_for(whole, node), code.made[whole]
    arguments = (x, factor, tuple(addends), out.shape[:-1], axes, keep, PIECES)
    new = Node(REDUCE, arguments, {}, [whole if keep else None, out], node.origin, node.source)
    return [new if other is place else other for other in code.nodes if other is not node]


def product_in(code: _Code, value: Value, reduction: Node) -> tuple[Value, ...] | None:
    """(x, factor, *addends), if the value is `x @ factor` plus addends and nothing else needs what it is made from."""
    node = code.made.get(value)
    if node is None or node.kwargs or (node.op in (MM, ADDMM) and not code.is_free(node, reduction)):
        return None
    if node.op in RESHAPES and node.args[0].shape[-1:] == value.shape[-1:]:
        return product_in(code, node.args[0], reduction) if code.only_for(node.args[0], node) else None
    if node.op == MM:
        return node.args
    if node.op == ADDMM and node.args[0].shape in (value.shape, value.shape[-1:]):
        return (*node.args[1:], node.args[0])
    alike = (value.shape, value.dtype)
    if node.op == ADD and all(isinstance(item, Value) and (item.shape, item.dtype) == alike for item in node.args):
        for term, other in (node.args[::-1], node.args):
            found = product_in(code, term, reduction) if term is not other and code.only_for(term, node) else None
            if found is not None:
                return (*found, other)
    return None


def bytes_of(node: Node) -> int:
    """Bytes of the whole value of a collective."""
    collective = communicates(node)
    return collective[2] if collective is not None else 0


def by_rows(node: Node) -> bool:
    """Whether a gather or a reduce-scatter is of the rows of [..., rows, columns]."""
    (c,) = parse_cuts(node.args[1])
    whole = node.outputs[0] if node.op.endswith("all_gather") else node.args[0]
    return (c.dim, c.outer, c.unit) == (len(whole.shape) - 2, 1, 1)


def most_pieces(shape: Sequence[int]) -> int:
    """Into how many pieces a part [..., rows, columns] can be cut: see `runtime.decomposition`."""
    lead = math.prod(shape[:-2])
    return lead if lead > 1 else shape[-2]


REWRITES: dict[str, Callable[[_Code, Node], list[Node]]] = {
    "planc.all_gather": gathered,
    "planc.reduce_scatter": scattered,
    "planc.all_reduce": reduced,
}
