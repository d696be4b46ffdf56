"""Random programs of many operators: where redistributions are shared, pulled through views, masked, summed late."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from compiler.ir.graph import Value
from tests.layout.differential import Program, check
from tests.layout.strategies import bounded, layouts, meshes


class Writer:
    """Writes a program by applying operators, picked at random, to values that are there already."""

    def __init__(self, data: st.DataObject):
        self.data, self.program = data, Program()
        self.values: list[Value] = []

    def pick(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def value(self) -> Value:
        return self.values[-1] if self.pick(0, 2) else self.data.draw(st.sampled_from(self.values))

    def input(self, *shape: int, kind: str = "slot") -> Value:
        return self.program.input(torch.randn(shape, dtype=torch.float64, requires_grad=True), kind)

    def call(self, op: str, *args, **kwargs) -> Value:
        return self.program.call(op, *args, **kwargs)[0]

    def step(self) -> None:
        name = self.data.draw(st.sampled_from([name for name in dir(self) if name.startswith("do_")]))
        made = getattr(self, name)()
        if made is not None and math.prod(made.shape) <= 400:
            self.values.append(made)

    # -- operators ---------------------------------------------------------------------------------------------------

    def do_unary(self):
        op = ("aten.tanh.default", "aten.neg.default", "aten.detach.default", "aten.sigmoid.default")[self.pick(0, 3)]
        return self.call(op, self.value())

    def do_binary(self):
        a, b = self.value(), self.value()
        try:
            torch.broadcast_shapes(a.shape, b.shape)
        except RuntimeError:
            return None
        return self.call(("aten.add.Tensor", "aten.mul.Tensor", "aten.sub.Tensor")[self.pick(0, 2)], a, b)

    def do_with_parameter(self):
        value = self.value()
        if not value.shape:
            return None
        weight = self.input(self.pick(1, 6), value.shape[-1], kind="param")
        bias = (self.input(weight.shape[0], kind="param"),) if self.pick(0, 1) else ()
        if self.pick(0, 1):
            return self.call("aten.linear.default", value, weight, *bias)
        turned = self.call("aten.permute.default", weight, (1, 0))
        return self.call("aten.matmul.default", value, turned)

    def do_merge(self):
        value = self.value()
        if len(value.shape) < 2:
            return None
        at = self.pick(0, len(value.shape) - 2)
        merged = (*value.shape[:at], value.shape[at] * value.shape[at + 1], *value.shape[at + 2 :])
        return self.call("aten.view.default", value, merged)

    def do_split(self):
        value = self.value()
        if not value.shape or len(value.shape) > 4:
            return None
        at = self.pick(0, len(value.shape) - 1)
        size = value.shape[at]
        parts = [k for k in range(1, size + 1) if size % k == 0]
        k = parts[self.pick(0, len(parts) - 1)]
        return self.call("aten.view.default", value, (*value.shape[:at], k, size // k, *value.shape[at + 1 :]))

    def do_permute(self):
        value = self.value()
        order = self.data.draw(st.permutations(range(len(value.shape))))
        return self.call("aten.permute.default", value, tuple(order))

    def do_sum(self):
        value = self.value()
        if not value.shape:
            return None
        return self.call("aten.sum.dim_IntList", value, (self.pick(0, len(value.shape) - 1),), bool(self.pick(0, 1)))

    def do_softmax(self):
        value = self.value()
        return self.call("aten.softmax.int", value, -1) if value.shape else None

    def do_expand(self):
        value = self.value()
        if len(value.shape) > 3:
            return None
        return self.call("aten.expand.default", value, (self.pick(1, 4), *value.shape))

    def do_halves(self):
        value = self.value()
        if not value.shape or value.shape[-1] % 2:
            return None
        half, at = value.shape[-1] // 2, len(value.shape) - 1
        low = self.call("aten.slice.Tensor", value, at, 0, half)
        high = self.call("aten.slice.Tensor", value, at, half, 2 * half)
        return self.call("aten.cat.default", (self.call("aten.neg.default", high), low), -1)

    def do_positions(self):
        value = self.value()
        if not value.shape:
            return None
        places = self.call("aten.arange.default", value.shape[-1], dtype="torch.int64")
        early = self.call("aten.lt.Scalar", places, 2)
        return self.call("aten.masked_fill.Scalar", value, early, 0.5)

    def do_ones(self):
        value = self.value()
        made = self.call("aten.full.default", value.shape, 1.5, dtype="torch.float64")
        return self.call("aten.add.Tensor", value, made)

    def do_mean(self):
        value = self.value()
        if not value.shape:
            return None
        dims = (self.pick(0, len(value.shape) - 1),)
        total = self.call("aten.sum.dim_IntList", value, dims, True)
        mean = self.call("aten.div.Tensor", total, self.call("planc.count", value, dims))
        return self.call("aten.sub.Tensor", value, mean)


@given(data=st.data())
@bounded(150)
def test_programs_mean_the_same_under_any_layout(data: st.DataObject):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    writer = Writer(data)
    for _ in range(writer.pick(1, 2)):
        writer.values.append(writer.input(*(writer.pick(1, 6) for _ in range(writer.pick(0, 3)))))
    for _ in range(writer.pick(2, 10)):
        writer.step()
    program = writer.program
    if not program.graph.nodes:
        return
    outs = data.draw(st.lists(st.sampled_from(writer.values), min_size=1, max_size=3, unique=True))
    program.graph.outputs = {out.name: out for out in outs}
    mesh = data.draw(meshes(most=3))
    check(program, mesh, {value: data.draw(layouts(value, mesh)) for value in program.graph.inputs})
