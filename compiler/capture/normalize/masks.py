"""Masks that depend on no input are constants: what they mean is found by computing them, not by how they are spelled.

    before:  %q : int64[64] = aten.arange.start_step(0, 64, 1)   …   %mask : bool[1, 1, 64, 64] = aten.le.Tensor(%k, %q)
             %a = planc.attention(%query, %key, %value, %mask, False, …)
    after:   %a = planc.attention(%query, %key, %value, None, True, …)

A mask that lets everything through is dropped; one that is exactly the causal triangle becomes `causal`, a band below
the diagonal a `window`. Transformers libraries build their masks from `arange`s in many ways, and a kernel can use
none. Of a conjunction, the part that compares the documents of query and key (`compiler.capture.normalize.documents`)
becomes `documents`, if the rest is known.

A mask has batch x heads x queries x keys elements, which may be billions. So a value is held with size 1 in every
dimension along which it does not vary, and what is still large is computed a few rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from compiler.capture.normalize.documents import conjuncts, same_document
from compiler.ir.graph import Graph, Node, Value
from compiler.ir.interpret import apply, operator

SMALL = 1 << 22
"""Elements up to which a value is computed and held as a whole."""
ALONG = {"aten.cumsum.default": 1, "aten.diff.default": 2, "aten.slice.Tensor": 1, "aten.cat.default": 1}
"""Operators that work along one dimension, with the place of that argument."""
TRIANGLES = {"aten.tril.default", "aten.triu.default"}
COMPARE = tuple(f"aten.{name}.Tensor" for name in ("le", "lt", "ge", "gt", "eq", "ne", "sub"))
LARGEST = 1 << 31
"""Elements (without those that repeat) of the largest mask that is looked at."""


@dataclass(frozen=True)
class Meaning:
    """What a mask lets through: keys up to the query's own position (`causal`), from `window - 1` positions before it on
    (`window`), and of the query's own document (`documents`, a value int64[batch, sequence])."""

    causal: bool = False
    window: int | None = None
    documents: Value | None = None


def recognize_masks(graph: Graph, constants: Mapping[str, Any]) -> None:
    """Replace masks of attention whose meaning is known, in place."""
    known: dict[Value, Meaning | None] = {}
    values = Constants(constants)
    for node in graph.nodes:
        if node.op != "planc.attention" or not isinstance(node.args[3], Value):
            continue
        mask, causal = node.args[3], node.args[4]
        if mask not in known:
            known[mask] = meaning(mask, values)
        found = known[mask]
        if found is None or not fits(found, node):
            continue
        special = () if found.window is None and found.documents is None else (found.window, found.documents)
        node.args = (*node.args[:3], None, causal or found.causal, *node.args[5:8], *special)


def fits(found: Meaning, node: Node) -> bool:
    """Whether attention's own arguments can say it: documents need one dimension of samples, in front of the heads."""
    query, documents = node.args[0], found.documents
    return documents is None or (len(query.shape) == 4 and documents.shape == (query.shape[0], query.shape[-2]))


def meaning(mask: Value, values: Constants) -> Meaning | None:
    """What a mask means; None for any other than those that `Meaning` can say, and one that is not known now."""
    if len(mask.shape) < 2:
        return None
    compared = {part: same_document(part) for part in conjuncts(mask)}
    documents = {value for value in compared.values() if value is not None}
    if len(documents) != 1:
        return constant_meaning(mask, values)
    rest = [part for part, value in compared.items() if value is None]
    found = constant_meaning(reduce(both, rest), values) if rest else Meaning()
    return found and replace(found, documents=documents.pop())


def both(one: Value, other: Value) -> Value:
    """The conjunction of two masks, as a value that no graph has."""
    shape = tuple(torch.broadcast_shapes(one.shape, other.shape))
    node = Node("aten.bitwise_and.Tensor", (one, other), {}, [])
    node.outputs = [Value("both", "bool", shape, producer=node)]
    return node.outputs[0]  # type: ignore[return-value]


def constant_meaning(mask: Value, values: Constants) -> Meaning | None:
    """The meaning of a mask that depends on no input: everything, a square triangle, or a band below the diagonal."""
    if not values.known(mask):
        return None
    count, columns = mask.shape[-2:]
    parts = values.by_rows(mask)
    if distance := values.by_distance(mask):  # then the first row and the last say everything
        parts = iter([(row, values.rows(mask, row, row + 1)) for row in dict.fromkeys((0, count - 1))])
    elif math.prod(mask.shape[-2:]) > LARGEST:
        return None
    everything, banded = True, count == columns
    window: int | None = None
    for start, part in parts:
        allowed = allowed_by(part) if part is not None else None
        if allowed is None:
            return None
        everything = everything and bool(allowed.all())
        if banded and (allowed.shape[-2] == 1 < count and not distance or allowed.shape[-1] == 1 < columns):
            banded = False  # the same in all rows, or all columns
        if banded:
            rows = torch.arange(start, start + allowed.shape[-2])
            if window is None:
                window = _last_seen(allowed, start)
            expected = torch.arange(columns) <= rows[:, None]
            if window is not None:
                expected &= torch.arange(columns) > rows[:, None] - window
            banded = bool((allowed == expected).all())
        if not everything and not banded:
            return None
    return Meaning() if everything else Meaning(True, window)


def _last_seen(allowed: Tensor, start: int) -> int | None:
    """The window that the first of these rows has which does not see the first column: how far it sees."""
    plane = allowed.flatten(0, -3).all(0) if allowed.dim() > 2 else allowed
    hidden = (~plane[:, 0]).nonzero()
    if not len(hidden):
        return None
    row = int(hidden[0])
    seen = plane[row].nonzero()
    return start + row - int(seen[0]) + 1 if len(seen) else 0


def allowed_by(mask: Tensor) -> Tensor | None:
    """True where a mask lets through, False where it leaves no weight; None for one that does something between."""
    if mask.dtype == torch.bool:
        return mask
    # -inf, or the most negative number: nothing is left after the exponential
    hidden = mask <= max(torch.finfo(mask.dtype).min, torch.finfo(torch.float32).min)
    return ~hidden if bool(((mask == 0) | hidden).all()) else None


class Constants:
    """The values that follow from constants alone. A held tensor has size 1 where its value does not vary."""

    def __init__(self, constants: Mapping[str, Any]):
        self.constants = {k: v for k, v in constants.items() if not isinstance(v, FakeTensor)}
        self.held: dict[Value, Tensor | None] = {}
        self.is_known: dict[Value, bool] = {}

    def known(self, value: Value) -> bool:
        """Whether no input is among what the value is computed from."""
        stack = [value]
        while stack:
            item = stack[-1]
            node = item.producer
            if item in self.is_known:
                stack.pop()
            elif node is None:
                self.is_known[item] = item.kind == "constant" and item.name in self.constants
            elif not node.op.startswith("aten.") and node.op != "planc.cast":
                self.is_known[item] = False
            else:
                waiting = [operand for operand in node.inputs if operand not in self.is_known]
                stack += waiting
                if not waiting:
                    self.is_known[item] = all(self.is_known[operand] for operand in node.inputs)
        return self.is_known[value]

    def by_rows(self, value: Value) -> Iterator[tuple[int, Tensor | None]]:
        """(first row, rows of the value) for all of them. Rows: the dimension before the last."""
        whole = self.whole(value)
        if whole is not None:
            yield 0, whole
            return
        count = value.shape[-2]
        step = max(1, SMALL // value.shape[-1])
        for start in range(0, count, step):
            yield start, self.rows(value, start, min(start + step, count))

    def whole(self, value: Value) -> Tensor | None:
        """The value, if it is small without what repeats."""
        for item in _in_order(value, self.held):
            self.held[item] = self.compute(item)
        return self.held[value]

    def compute(self, value: Value) -> Tensor | None:
        node = value.producer
        if node is None:
            return varying(self.constants[value.name])
        operands = {operand: self.held[operand] for operand in node.inputs}
        if any(tensor is None for tensor in operands.values()):
            return None
        made = self.repeating(node, value, operands)  # type: ignore[arg-type]
        if made is None:
            if any(math.prod(shape) > SMALL for shape in (value.shape, *(x.shape for x in operands))):
                return None
            full = {x: tensor.expand(x.shape) for x, tensor in operands.items() if tensor is not None}
            made = dict(zip(node.outputs, apply(node, full)))[value]
        return varying(made) if made.numel() <= SMALL else None

    def repeating(self, node: Node, value: Value, operands: Mapping[Value, Tensor]) -> Tensor | None:
        """The result of an operator that can work on operands that keep size 1 where they repeat."""
        if is_pointwise(node):
            size = math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in operands.values()))) if operands else 1
            return _ranked(apply(node, operands)[0], value) if size <= SMALL else None
        if node.op in ("aten.expand.default", "aten.view.default") and _only_ones(node.args[0], value):
            return _ranked(operands[node.args[0]], value)
        if node.op == "aten.full.default":
            return torch.full([1] * len(value.shape), node.args[1], dtype=getattr(torch, value.dtype))
        if node.op == "aten.index.Tensor":
            return _indexed(node, value, operands)
        if node.op in ALONG:
            return _along(node, operands)
        return None

    def rows(self, value: Value, start: int, end: int) -> Tensor | None:
        """Some rows of a value that is too large to be held."""
        whole = self.whole(value)
        if whole is not None:
            return whole[..., start:end, :] if whole.dim() > 1 and whole.shape[-2] > 1 else whole
        node = value.producer
        if node is None:
            return None
        if node.op in ("aten.expand.default", "aten.view.default") and _only_ones(node.args[0], value):
            return self.rows(node.args[0], start, end) if value.shape[-2:] == node.args[0].shape[-2:] else None
        if node.op in TRIANGLES:
            return self.triangle(node, value, start, end)
        if not is_pointwise(node):
            return None
        parts = {operand: self.rows(operand, start, end) for operand in dict.fromkeys(node.inputs)}
        return None if any(part is None for part in parts.values()) else apply(node, parts)[0]


    def by_distance(self, value: Value) -> bool:
        """Whether all that a value, […, n, n], depends on is how far row and column are apart: it is made element by
        element, and of positions only where those of rows and columns are compared."""
        node = value.producer
        if node is None or value.shape[-2:] == (1, 1) or len(value.shape) < 2:
            return self.whole(value) is not None and self.whole(value).shape[-2:] in ((1, 1), (1,), ())  # type: ignore[union-attr]
        if node.op in ("aten.expand.default", "aten.view.default"):
            return value.shape[-2:] == node.args[0].shape[-2:] and self.by_distance(node.args[0])
        if node.op == "aten.full.default":
            return True
        if not is_pointwise(node):
            return False
        if node.op in COMPARE and all(isinstance(operand, Value) for operand in node.args[:2]):
            lines = [self.line(operand) for operand in node.args[:2]]
            if {line for line in lines} == {-2, -1} and value.shape[-2] == value.shape[-1]:
                return True
        return all(self.by_distance(operand) for operand in node.inputs)

    def line(self, value: Value) -> int | None:
        """The dimension, from the end, along which a value counts 0, 1, 2, … from any number on, and is the same along
        all others."""
        whole = self.whole(value)
        if whole is None or whole.dtype.is_floating_point or whole.dtype == torch.bool or whole.dim() == 0:
            return None
        dims = [dim - whole.dim() for dim, size in enumerate(whole.shape) if size > 1]
        if len(dims) != 1:
            return None
        flat = whole.flatten()
        return dims[0] if bool((torch.diff(flat) == 1).all()) else None

    def triangle(self, node: Node, value: Value, start: int, end: int) -> Tensor | None:
        """Some rows of `tril(x, d)` or `triu(x, d)`."""
        part = self.rows(node.args[0], start, end)
        if part is None:
            return None
        edge = torch.arange(start, end)[:, None] + (node.args[1] if len(node.args) > 1 else 0)
        columns = torch.arange(value.shape[-1])
        kept = columns <= edge if node.op == "aten.tril.default" else columns >= edge
        return torch.where(kept, part, torch.zeros((), dtype=part.dtype))


def varying(tensor: Tensor) -> Tensor:
    """The tensor with size 1 in every dimension along which it does not vary."""
    for dim, size in enumerate(tensor.shape):
        if size > 1 and bool((tensor == tensor.narrow(dim, 0, 1)).all()):
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def is_pointwise(node: Node) -> bool:
    return node.op == "planc.cast" or torch.Tag.pointwise in operator(node.op).tags


def _in_order(value: Value, done: Mapping[Value, Any]) -> list[Value]:
    """What must be computed for a value, operands first."""
    order: dict[Value, None] = {}
    stack = [(value, False)]
    while stack:
        item, ready = stack.pop()
        if item in done or item in order:
            continue
        if ready or item.producer is None:
            order[item] = None
        else:
            stack.append((item, True))
            stack += [(operand, False) for operand in item.producer.inputs]
    return list(order)


def _only_ones(x: Value, result: Value) -> bool:
    """Whether a view or expansion adds dimensions only in front (of any size, for a value that repeats there)."""
    front = len(result.shape) - len(x.shape)
    if front < 0:
        return all(size == 1 for size in x.shape[:-front]) and x.shape[-front:] == result.shape
    pairs = zip(x.shape, result.shape[front:])
    grows = result.producer is not None and result.producer.op == "aten.expand.default"
    same = all(a == b or (grows and a == 1) for a, b in pairs)
    return same and (grows or all(size == 1 for size in result.shape[:front]))


def _ranked(tensor: Tensor, value: Value) -> Tensor:
    """With as many dimensions as the value, those in front of size 1."""
    rank = len(value.shape)
    while tensor.dim() > rank:
        tensor = tensor[0]
    return tensor[(None,) * (rank - tensor.dim())]


def _along(node: Node, operands: Mapping[Value, Tensor]) -> Tensor | None:
    """The result of an operator that works along one dimension: only that one must be there as a whole."""
    place = ALONG[node.op]
    rank = len(node.inputs[0].shape)
    dim = (node.args[place] if len(node.args) > place else -1 if node.op == "aten.diff.default" else 0) % rank
    common = torch.broadcast_shapes(*([*t.shape[:dim], 1, *t.shape[dim + 1 :]] for t in operands.values()))
    full = {x: t.expand(*common[:dim], x.shape[dim], *common[dim + 1 :]) for x, t in operands.items()}
    if max(tensor.numel() for tensor in full.values()) > SMALL:
        return None
    return apply(node, full)[0]


def _indexed(node: Node, value: Value, operands: Mapping[Value, Tensor]) -> Tensor | None:
    """`x[i, j]` with an index for each dimension: one along which x does not vary makes no difference."""
    x, indices = node.args
    if len(indices) != len(x.shape) or not all(isinstance(i, Value) and i.dtype.startswith("int") for i in indices):
        return None
    table = operands[x]
    found = [operands[i] if table.shape[k] > 1 else torch.zeros((), dtype=torch.int64) for k, i in enumerate(indices)]
    if math.prod(torch.broadcast_shapes(*(i.shape for i in found))) > SMALL:
        return None
    return _ranked(table[tuple(found)], value)


