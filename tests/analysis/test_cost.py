"""The cost model: operations as torch counts them, times of a roofline, communication of known volume."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import flop_counter

from compiler.analysis.cost import Cost, cost_of, costs, node_flops, transient_bytes
from compiler.analysis.machine import Machine, machine
from compiler.autodiff.partition import SegmentCode
from compiler.driver import Compilation, compile
from compiler.dsl import loads
from compiler.dsl.devices import known_devices
from compiler.dsl.strings import Link
from compiler.ir.graph import Node, Value
from compiler.layout.placement import Mesh
from tests.test_tensor import text as tensor_text
from tests.zoo import ZooModel, get, loss_of, plan_text, select

# c46 is refused; in LoRA eager PyTorch leaves out the gradient of a frozen key, which attention's own kernels make.
MODELS = [e for e in select(size="tiny", branch=False) if e.name not in ("c46_vmap_mask", "lora-tiny")]
FEW = ("gpt-tiny", "llama-odd-tiny", "encdec-tiny", "vit-tiny", "resnet-tiny", "mlp-tiny", "gpt-attention-dropout-tiny")
ONE = Machine(known_devices()["h100"], Mesh(()), 1)


def compiled(text: str) -> Compilation:
    return compile(loads(text, "cost.plan"))


def counted(entry: ZooModel) -> int:
    """Operations of a step of the eager model, as torch counts them."""
    model, batch = entry.build(), entry.batch(4)
    with sdpa_kernel(SDPBackend.MATH), flop_counter.FlopCounterMode(display=False) as counter:
        loss_of(model(**batch)).backward()
    return counter.get_total_flops()


def predicted(compilation: Compilation) -> int:
    """Operations of all calls, with attention counted as the eager model does it: all of the scores, kept for the
    backward."""
    total = 0
    for kind in compilation.linked.kinds.values():
        for node in [*kind.code.forward, *kind.code.backward]:
            total += len(kind.calls) * eager_flops(node)
    return total


def eager_flops(node: Node) -> int:
    if not node.op.startswith("planc.attention"):
        return node_flops(node)
    back = node.op.endswith("backward")
    shapes = [value.shape for value in node.inputs[back : back + 3]]
    forward = flop_counter.sdpa_flop_count(*shapes)
    return 2 * forward if back else forward


@pytest.mark.parametrize(
    "entry", [pytest.param(e, id=e.name, marks=() if e.name in FEW else pytest.mark.full) for e in MODELS]
)
def test_operations_as_torch_counts_them(entry: ZooModel) -> None:
    assert predicted(compiled(plan_text(entry, batch=4, mesh="dp=1", optimizer=""))) == counted(entry)


def test_causal_attention_is_half() -> None:
    shape = (2, 4, 16, 8)
    full, half, back = (
        attention(shape, causal, backward) for causal, backward in ((False, False), (True, False), (False, True))
    )
    assert node_flops(full) == flop_counter.sdpa_flop_count(shape, shape, shape) == 2 * node_flops(half)
    assert node_flops(back) == flop_counter.sdpa_backward_flop_count(shape, shape, shape, shape)


def attention(shape: tuple[int, ...], causal: bool, backward: bool) -> Node:
    query, key, value, out = (Value(name, "float32", shape) for name in "qkvo")
    if backward:
        lse = Value("lse", "float32", shape[:-1])
        return Node(
            "planc.attention_backward", (out, query, key, value, None, out, lse, causal, 1.0), {}, [query, key, value]
        )
    return Node("planc.attention", (query, key, value, None, causal, 1.0), {}, [out])


def test_a_roofline() -> None:
    """A large product is bound by arithmetic, a sum by memory, a view by nothing."""
    a, b, c = (Value(name, "bfloat16", (4096, 4096)) for name in "abc")
    device = ONE.device
    product = cost_of([Node("aten.mm.default", (a, b), {}, [c])], ONE)
    assert product.flops == 2 * 4096**3 and product.seconds == pytest.approx(2 * 4096**3 / device.flops["bfloat16"])
    plus = cost_of([Node("aten.add.Tensor", (a, b), {}, [c])], ONE)
    assert plus.flops == 0 and plus.seconds == pytest.approx(3 * a.nbytes / device.bandwidth)
    assert cost_of([Node("aten.t.default", (a,), {}, [c])], ONE) == Cost()


def test_links() -> None:
    """Groups within a node use its links, others those between nodes."""
    near, far = Link("near", 900e9, 1e-6), Link("far", 50e9, 5e-6)
    eight = Machine(ONE.device, Mesh((("pp", 4), ("dp", 2), ("tp", 4), ("micro", 3))), 8, near, far)
    assert [eight.link(axes).name for axes in (("tp",), ("dp",), ("dp", "tp"), ("pp",), ("pp", "tp"))] == [
        "near", "near", "near", "far", "far",
    ]  # fmt: skip
    assert eight.communication("all_reduce", ("tp",), 1 << 30) == pytest.approx(4e-6 + 2 * (1 << 30) * 3 / 4 / 900e9)
    assert eight.communication("send", ("pp",), 1 << 30) == pytest.approx(5e-6 + (1 << 30) / 50e9)


def test_a_collective_that_starts_early_is_hidden() -> None:
    pair = Machine(ONE.device, Mesh((("tp", 2),)), 8)
    a, b, c, d = (Value(name, "bfloat16", (8192, 8192)) for name in "abcd")
    work = Value("work", "bfloat16", (8192, 8192), "work")
    product = Node("aten.mm.default", (a, b), {}, [c])
    late = cost_of([product, Node("planc.all_reduce", (a, ("tp",), "sum"), {}, [d])], pair)
    early = cost_of(
        [
            Node("planc.start_all_reduce", (a, ("tp",), "sum"), {}, [work]),
            product,
            Node("planc.wait", (work,), {}, [d]),
        ],
        pair,
    )
    assert late.sent == early.sent == a.nbytes
    assert late.seconds == pytest.approx(late.compute_s + pair.communication("all_reduce", ("tp",), a.nbytes))
    assert early.seconds == pytest.approx(max(early.compute_s, pair.communication("all_reduce", ("tp",), a.nbytes)))


def test_a_product_in_pieces_hides_all_but_one_piece() -> None:
    """Of the shorter of product and communication."""
    pair = Machine(ONE.device, Mesh((("tp", 2),)), 8)
    a, b, c = (Value(name, "bfloat16", (8192, 8192)) for name in "abc")
    whole = cost_of([Node("aten.mm.default", (a, b), {}, [c])], pair)
    pieces = cost_of([Node("planc.matmul_reduce", (a, b, (), (8192,), ("tp",), False, 4), {}, [None, c])], pair)
    link = 4 * pair.communication("all_reduce", ("tp",), c.nbytes // 4)
    assert (pieces.flops, pieces.sent) == (whole.flops, c.nbytes)
    assert pieces.seconds == pytest.approx(max(whole.seconds, link) + min(whole.seconds, link) / 4)


def test_what_lives_while_a_call_runs() -> None:
    """Of two products in a row the first's result; of a backward also the gradients that it was given."""
    x, w, h, y = (Value(name, "float32", (16, 16), kind) for name, kind in zip("xwhy", ("slot", "param", "", "")))
    forward = [Node("aten.mm.default", (x, w), {}, [h]), Node("aten.mm.default", (h, w), {}, [y])]
    d_y, d_x = Value("d_y", "float32", (16, 16), "cotangent"), Value("d_x", "float32", (16, 16))
    backward = [Node("aten.mm.default", (d_y, w), {}, [d_x])]
    code = SegmentCode([x, w], forward, [y], [], [1], [0], [d_y], backward, [0], [d_x], {})
    assert transient_bytes(replace(code, backward=[], gradients=[], cotangents=[])) == h.nbytes
    assert transient_bytes(code) == d_y.nbytes + d_x.nbytes


def test_a_llama_block() -> None:
    """Forward, both parts of the backward, and what they leave behind: Megatron's communication over tp."""
    compilation = compiled(tensor_text("llama-tiny", "tp=2", batch=4))
    kind = compilation.linked.kinds["layers"]
    cost = costs(kind, machine(compilation.plan, Mesh((("tp", 2),))))
    hidden = 4 * 8 * 16 * 4  # [batch, seq, dim] in float32
    assert cost.result_bytes == (hidden,) and cost.forward.sent == cost.backward.sent == 2 * hidden
    assert cost.input.sent == cost.backward.sent and cost.weight.sent == 0
    assert cost.input.flops + cost.weight.flops == cost.backward.flops
    products = cost.forward.flops - attention_flops(kind.code.forward)
    assert cost.weight.flops == products and cost.backward.flops == 2 * products + attention_flops(kind.code.backward)


def attention_flops(nodes: list[Node]) -> int:
    return sum(node_flops(node) for node in nodes if node.op.startswith("planc.attention"))


def test_the_machine_of_a_plan() -> None:
    text = plan_text(get("llama-tiny"), mesh="dp=4").replace(
        "mesh", 'cluster { nodes = 2, device = h100, intra = "nvlink 450GB/s", memory = 40GB }\nmesh'
    )
    found = machine(loads(text, "x.plan"), Mesh((("dp", 4),)))
    assert found.devices == 2 and found.device.memory == 40_000_000_000
    assert found.link(("dp",)) is found.inter and found.intra == Link("nvlink", 450e9, 5e-6)
    assert found.peak("bfloat16") == 989e12 and found.peak("float8_e5m2") == found.peak("float32")
