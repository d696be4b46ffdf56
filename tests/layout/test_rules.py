"""Every rule against the operator itself: random sizes, random layouts, results and gradients on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiler.layout.placement import Layout, Mesh, Shard
from compiler.layout.redistribute import COLLECTIVES
from compiler.layout.rules.pointwise import LINEAR, POINTWISE, overloads
from tests.layout.differential import Program, check
from tests.layout.operators import CALLS, flags, real, unit
from tests.layout.strategies import bounded, layouts, meshes

def as_program(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """A graph of one node; a tensor that is used twice is one input."""
    program, inputs = Program(), {}

    def value(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if id(item) not in inputs:
                inputs[id(item)] = program.input(item.detach().requires_grad_(item.requires_grad))
            return inputs[id(item)]
        return tuple(map(value, item)) if isinstance(item, tuple) else item

    program.call(op, *map(value, args), **kwargs)
    return program


@pytest.mark.parametrize("name", CALLS)
@given(data=st.data())
@bounded(15)
def test_local_work_is_the_global_operator(name: str, data: st.DataObject):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    program = as_program(*CALLS[name](lambda low, high: data.draw(st.integers(low, high))))
    mesh = data.draw(meshes())
    chosen = {value: data.draw(layouts(value, mesh)) for value in program.graph.inputs}
    check(program, mesh, chosen)


def sample(kind: str, integral: bool, shape: tuple[int, ...]) -> Any:
    """An argument of a pointwise operator, by its type in the signature."""
    if kind == "Tensor":
        return torch.randint(1, 4, shape) if integral else unit(*shape).detach()
    return {"number": 2 if integral else 0.5, "int": 1, "bool": False, "float": 0.5, "str": "floor"}[kind]


@pytest.mark.parametrize("op", [*overloads([*POINTWISE, *LINEAR])])
def test_pointwise_operators_are_pointwise(op: str):
    """All of them: what is listed as pointwise takes parts of its operands, broadcast too, and makes a part."""
    if op == "aten.mvlgamma.default":
        pytest.skip("defined for larger numbers only")
    _, packet, overload = op.split(".")
    integral = packet.startswith(("__", "bitwise_", "gcd", "lcm"))
    shapes, positional, named = iter([(5, 4), (4,), (5, 1)]), [], {}
    for item in getattr(getattr(torch.ops.aten, packet), overload)._schema.arguments:
        kind = str(item.type).removeprefix("Optional[").removesuffix("]")
        if item.name == "condition":
            argument: Any = flags(*next(shapes))
        elif item.has_default_value() and item.name not in ("min", "max"):
            continue
        else:
            argument = sample(kind, integral, next(shapes) if kind == "Tensor" else ())
        positional += [] if item.kwarg_only else [argument]
        named |= {item.name: argument} if item.kwarg_only else {}
    program = as_program(op, tuple(positional), named)
    cuts = {v: Layout({"dp": Shard(0)} if v.shape[0] == 5 else {"tp": Shard(0)}) for v in program.graph.inputs}
    found = check(program, Mesh((("dp", 2), ("tp", 2))), cuts)
    assert not any(node.op in COLLECTIVES for node in found.graph.nodes)


MADE = {
    "full": ("aten.full.default", ((6, 4), 2.5), {"dtype": "torch.float64"}),
    "zeros": ("aten.zeros.default", ((6, 4),), {"dtype": "torch.float64"}),
    "ones_like": ("aten.ones_like.default", ("x",), {}),
    "full_like": ("aten.full_like.default", ("x", 2.5), {}),
    "new_zeros": ("aten.new_zeros.default", ("x", (6, 4)), {}),
    "new_full": ("aten.new_full.default", ("x", (4,), 2.5), {}),
    "arange": ("aten.arange.start_step", (0, 8, 2), {}),
    "eye": ("aten.eye.m", (6, 4), {}),
    "linspace": ("aten.linspace.default", (0.0, 1.0, 4), {}),
}


@pytest.mark.parametrize("name", MADE)
@given(data=st.data())
@bounded(10)
def test_what_is_made_is_made_in_part(name: str, data: st.DataObject):
    """A tensor of numbers meets a cut value."""
    op, args, kwargs = MADE[name]
    program = Program()
    x = program.input(real(6, 4))
    (made,) = program.call(op, *(x if item == "x" else item for item in args), **kwargs)
    program.call("aten.mul.Tensor", x, made)
    mesh = data.draw(meshes())
    check(program, mesh, {x: data.draw(layouts(x, mesh))})
