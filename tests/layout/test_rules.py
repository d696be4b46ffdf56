"""Every rule against the operator itself: random sizes, random layouts, results and gradients on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.differential import Program, check
from tests.layout.operators import CALLS
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
@bounded(20)
def test_local_work_is_the_global_operator(name: str, data: st.DataObject):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    program = as_program(*CALLS[name](lambda low, high: data.draw(st.integers(low, high))))
    mesh = data.draw(meshes())
    chosen = {value: data.draw(layouts(value, mesh)) for value in program.graph.inputs}
    check(program, mesh, chosen)
