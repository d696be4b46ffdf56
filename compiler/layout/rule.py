"""Rules: how an operator's dimensions correspond, as named factors.

A rule is written einsum-like. For `linear` it is `"... k, n k, n -> ... n"`: every dimension of every operand and
result is a factor (or a product of factors, `(b s)`), and the same name means the same index. From that alone the
propagation derives which cuts an operator can work under:

- a factor in the results may be cut: each rank computes its part;
- a factor that is only in operands is *reduced*: cutting it turns the results into partial terms;
- a factor that is `fixed` (the dimension of a sort, …) must be whole on every rank;
- one that is several others `joined`, one behind the other, may be cut in pieces, its parts (compiler/layout/joined.py);
- an operand without the factor is used whole, in work that differs from rank to rank.

`linear` names the groups of operands in which the operator is linear: if all operands of one group are partial sums
and all others whole, the results are partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from compiler.ir.graph import Node, Value

Dims = tuple[tuple[str, ...], ...]
"""For each dimension, the factors whose product it is, outermost first."""

Localize = Callable[[Node, "LocalShapes"], tuple[str, tuple[Any, ...], dict[str, Any]]]
LocalShapes = Callable[[Value], tuple[int, ...]]


@dataclass(frozen=True)
class Method:
    """Where an axis cuts operands along each factor of `given`, it is to cut those of `cut` instead, together: each
    operand along the first of them that it has. With several, the operator itself communicates what is missing. `back`:
    the results are brought back to the cut along this factor."""

    given: tuple[str, ...]
    cut: tuple[str, ...]
    back: str = ""


@dataclass(frozen=True)
class Rule:
    """One operator call's rule.

    `operands` has an entry for each of `node.inputs` (in that order), `results` for each of `node.outputs`. `sizes`
    gives each factor's size. `joined` names for a factor those that it is, one behind the other. `reduces` gives the
    reduction of a factor that is not in the results ("sum" if absent). `addends` are operands that are added to what is
    summed (a bias): where a summed factor is cut, one rank alone adds them. A `collective` factor is reduced by the
    operator itself, which communicates where it is cut: its results are whole (or cut along it, if they have it). From
    a `picked` factor the operator reads chosen positions, so its padding does not matter. Neither is cut in zigzag
    order: the operator knows where a part begins. `methods` are ways to work under cuts that a strategy may ask for by
    name. `shape_only` operands are asked for their type alone: any layout will do. `size_arg` is the index of a
    positional argument that is the first result's shape, to be replaced by the local shape. `localize` rewrites the
    call where that is not enough. `cheap`: recomputing the result from its operands costs next to nothing (a view, a
    fill), so a consumer that needs only a part of it gets a call of its own that makes just that part.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims | None, ...]
    sizes: Mapping[str, int]
    reduces: Mapping[str, str] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    addends: frozenset[int] = frozenset()
    collective: frozenset[str] = frozenset()
    picked: frozenset[str] = frozenset()
    methods: Mapping[str, Method] = field(default_factory=dict)
    shape_only: frozenset[int] = frozenset()
    size_arg: int | None = None
    localize: Localize | None = None
    cheap: bool = False
    fallback: bool = False

    @property
    def solid(self) -> frozenset[str]:
        """The factors that no cut may fall on by itself."""
        return self.fixed | self.joined.keys() | {part for parts in self.joined.values() for part in parts}


Builder = Callable[[Node], Rule]
_REGISTRY: dict[str, Builder] = {}


def rule(*ops: str) -> Callable[[Builder], Builder]:
    """Register the decorated function as the rule of the named operators."""

    def register(builder: Builder) -> Builder:
        for op in ops:
            if op in _REGISTRY:
                raise ValueError(f"{op} has two rules")
            _REGISTRY[op] = builder
        return builder

    return register


def rule_of(node: Node) -> Rule:
    """The rule for this call; without one, every dimension must be whole (always right, but not parallel).

    A rule depends on the call's types and constants alone, so calls that are alike share one: the layers of a model.
    """
    import compiler.layout.rules  # noqa: F401  (registers them; imported late because rules import this module)

    alike = (node.op, _typed(node.args), _typed(tuple(node.kwargs.items())), _typed(tuple(node.outputs)))
    found = _BUILT.get(alike)
    if found is None:
        builder = _REGISTRY.get(node.op)
        found = _BUILT[alike] = builder(node) if builder else whole(node)
    return found


_BUILT: dict[Any, Rule] = {}


def _typed(argument: Any) -> Any:
    """The argument with each value replaced by its type; 1, 1.0 and True stay apart."""
    if isinstance(argument, Value):
        return argument.dtype, argument.shape
    if isinstance(argument, (tuple, list)):
        return tuple(map(_typed, argument))
    return type(argument), argument


def whole(node: Node) -> Rule:
    """Every operand and result whole on every rank."""
    sizes: dict[str, int] = {}

    def dims(value: Value, prefix: str) -> Dims:
        names = [f"{prefix}{i}" for i in range(len(value.shape))]
        sizes.update(zip(names, value.shape))
        return tuple((name,) for name in names)

    operands = tuple(dims(value, f"o{k}_") for k, value in enumerate(node.inputs))
    results = tuple(None if out is None else dims(out, f"r{k}_") for k, out in enumerate(node.outputs))
    return Rule(operands, results, sizes, fixed=frozenset(sizes), fallback=True)


def parse_dims(text: str, shape: tuple[int, ...]) -> Dims:
    """`"... (a b) c"` for a shape; `...` expands to factors `.0`, `.1`, … counted from its right end."""
    tokens = text.replace("(", " ( ").replace(")", " ) ").split()
    dims: list[tuple[str, ...] | None] = []
    group: list[str] | None = None
    for token in tokens:
        if token == "(":
            group = []
        elif token == ")":
            dims.append(tuple(group or ()))
            group = None
        elif group is not None:
            group.append(token)
        elif token == "...":
            dims.append(None)
        else:
            dims.append(() if token == "1" else (token,))
    spare = len(shape) - sum(item is not None for item in dims)
    result: list[tuple[str, ...]] = []
    for item in dims:
        if item is None:
            result += [(f".{k}",) for k in range(spare - 1, -1, -1)]
        else:
            result.append(item)
    if len(result) != len(shape):
        raise ValueError(f"{text!r} does not fit a tensor of {len(shape)} dimensions")
    return tuple(result)


def einsum(node: Node, text: str, sizes: Mapping[str, int] | None = None, **options: Any) -> Rule:
    """The rule written as `"operand, operand -> result, result"`; operands that the call leaves out are left out here.

    Factor sizes are read off the shapes; of a dimension with several factors all but one must be in `sizes`.
    A dimension of size 1 where the factor is larger is a broadcast: it gets no factor.
    """
    left, right = text.split("->")
    operands = [parse_dims(part, value.shape) for part, value in zip(left.split(","), node.inputs)]
    results = [
        None if out is None else parse_dims(part, out.shape) for part, out in zip(right.split(","), node.outputs)
    ]
    known = dict(sizes or {})
    pairs = [(dims, value) for dims, value in zip(operands, node.inputs)]
    pairs += [(dims, out) for dims, out in zip(results, node.outputs) if dims is not None and out is not None]
    for _ in range(2):
        for dims, value in pairs:
            for factors, size in zip(dims, value.shape):
                missing = [name for name in factors if name not in known]
                if len(missing) == 1 and (size != 1 or len(factors) > 1 or _ == 1):
                    known[missing[0]] = size // math.prod(known[name] for name in factors if name != missing[0])

    def broadcast(dims: Dims, value: Value) -> Dims:
        return tuple(
            () if size == 1 and math.prod(known[name] for name in factors) != 1 else factors
            for factors, size in zip(dims, value.shape)
        )

    return Rule(
        tuple(broadcast(dims, value) for dims, value in zip(operands, node.inputs)),
        tuple(None if dims is None or out is None else broadcast(dims, out) for dims, out in zip(results, node.outputs)),
        known,
        **options,
    )


__all__ = ["Dims", "Rule", "einsum", "parse_dims", "rule", "rule_of", "whole"]
