"""Communication behind computation: exact, in the right order, and without more memory than is under way."""

from __future__ import annotations

import pytest

from compiler.analysis.cost import cost_of
from compiler.analysis.machine import machine
from compiler.analysis.verify import TOLERANCE, random_batch, verify
from compiler.autodiff.partition import SegmentCode
from compiler.driver import Compilation, compile
from compiler.dsl import loads
from compiler.ir.graph import Node, Value
from compiler.layout.placement import Mesh
from compiler.link import Kind
from compiler.overlap.behind import STARTS, behind
from compiler.overlap.footprint import Footprint
from runtime.program import load
from runtime.simulate import simulate
from runtime.transport import InProcessTransport, Work
from tests.test_tensor import text
from tests.zoo import get, plan_text

OVERLAP = "style = manual\n overlap = on"
MODELS = ["llama-tiny", "llama-odd-tiny", "c12_dropout", "c14_vocab_odd", "hf-gpt2"]


def plan(name: str, mesh: str, sequence: bool, overlap: bool = True, policy: str = "", **more: int) -> str:
    written = text(name, mesh, sequence=sequence, **more)
    return (written.replace("style = manual", OVERLAP) if overlap else written) + policy


def compiled(*arguments, **options) -> Compilation:
    return compile(loads(plan(*arguments, **options), "overlap.plan"))


def ops(nodes: list[Node]) -> list[str]:
    return [node.op.removeprefix("planc.") for node in nodes]


# -- exactness -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_one_device(name: str, ranks: int, sequence: bool) -> None:
    verdict = verify(loads(plan(name, f"tp={ranks}", sequence), "overlap.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("overlap", [False, True], ids=["behind", "pieces"])
def test_with_recomputation(policy: str, overlap: bool) -> None:
    written = plan("llama-tiny", "tp=2", True, overlap, f'recompute "layers.*" = {policy}\n')
    verdict = verify(loads(written, "overlap.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


def test_over_sub_axes() -> None:
    """Two key/value heads on four ranks: the axis is split, and all its parts communicate in pieces."""
    plan_ = loads(plan("llama-tiny", "tp=4", True), "overlap.plan")
    row = next(item for item in compile(plan_).asked if item.request == "overlap = on")
    assert row.detail.startswith("13 of ")
    verdict = verify(plan_, steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("pp=2 tp=2", "pipeline over pp { schedule = zb_h1, microbatches = 2 }"),
        ("cp=2 tp=2", "context over cp { attention = ring }"),
        ("dp=2 tp=2", "zero over dp { stage = 3, bucket = 4kB }"),
    ],
    ids=["pipeline", "context", "zero"],
)
def test_with_other_strategies(mesh: str, more: str) -> None:
    """Split backwards, parts in zigzag order, gathered parameters."""
    written = loads(plan("llama-tiny", mesh, True, policy=f"{more}\n"), "overlap.plan")
    row = next(item for item in compile(written).asked if item.request == "overlap = on")
    assert row.detail == "13 of 20 collectives in pieces, 5 behind other work, 2 beside no product"
    verdict = verify(written, steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


def test_one_row_and_micro_batches() -> None:
    """Pieces of the sequence where a micro-batch has one row, and uneven rows."""
    written = text("llama-odd-tiny", "dp=2 tp=2", parts=2, sequence=True, batch=3).replace("style = manual", OVERLAP)
    assert "gather_matmul" in str(
        [ops(k.code.forward) for k in compile(loads(written, "x.plan")).linked.kinds.values()]
    )
    verdict = verify(loads(written, "overlap.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


# -- structure -----------------------------------------------------------------------------------------------------------


def under_way(nodes: list[Node]) -> dict[str, list[str]]:
    """What runs between each start and its wait, by the collective's result."""
    found: dict[str, list[str]] = {}
    for k, node in enumerate(nodes):
        if node.op in STARTS.values():
            (handle,) = node.outputs
            end = next(j for j, other in enumerate(nodes) if handle in other.inputs)
            assert k < end and nodes[end].op == "planc.wait"
            found[nodes[end].outputs[0].name] = ops(nodes[k + 1 : end])
    return found


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_weight_gradients_hide_the_reduction_of_input_gradients(sequence: bool) -> None:
    code = compiled("llama-tiny", "tp=2", sequence, overlap=False).linked.kinds["layers"].code
    found = under_way(code.backward)
    assert len(found) == 2, "the input gradients of both column layers"
    for between in found.values():
        assert between.count("product_into") >= 2
        assert "aten.mm.default" not in between, "nothing that the collective itself needs"
    assert not under_way(code.forward), "forward, each collective needs what is before it, and all else needs it"


def test_what_is_recomputed_hides_a_gather() -> None:
    code = compiled("llama-tiny", "tp=2", True, False, 'recompute "layers.*" = full\n').linked.kinds["layers"].code
    between = [op for each in under_way(code.backward).values() for op in each]
    assert {"aten.mm.default", "product_into"} <= set(between)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_no_more_memory_than_one_collective_holds(policy: str, sequence: bool) -> None:
    recompute = f'recompute "layers.*" = {policy}\n'
    kind = compiled("llama-tiny", "tp=2", sequence, False, recompute).linked.kinds["layers"]
    now, before = kind.code, kind.recorded
    assert ops(now.backward) != ops(before.backward)
    held = max(n.args[0].nbytes + n.outputs[0].nbytes for n in now.backward if n.op in STARTS.values())
    assert peak(now) <= peak(before) + held


def peak(code: SegmentCode) -> int:
    return Footprint(code.backward, [*code.saved, *code.cotangents], code.gradients).peak(code.backward)


def test_pieces_are_where_nothing_else_hides_a_collective() -> None:
    compilation = compiled("llama-tiny", "tp=2", True)
    code = compilation.linked.kinds["layers"].code
    assert [op for op in ops(code.forward) if "mat" in op] == ["gather_matmul", "matmul_scatter"] * 2
    assert ops(code.backward).count("gather_matmul") == 2 and ops(code.backward).count("start_reduce_scatter") == 2
    row = next(item for item in compilation.asked if item.request == "overlap = on")
    assert (row.outcome, row.detail) == (
        "partly",
        "13 of 20 collectives in pieces, 5 behind other work, 2 beside no product",
    )


def test_without_sequence_parallelism_the_sums_of_row_layers_are_in_pieces() -> None:
    code = compiled("llama-tiny", "tp=2", False).linked.kinds["layers"].code
    assert [op for op in ops(code.forward) if "reduce" in op] == ["matmul_reduce"] * 2


def test_nothing_to_do_is_said() -> None:
    """Sums of looked-up rows stand beside no product."""
    written = plan_text(get("llama-tiny"), 4, "tp=2", extra=f'tensor over tp {{ vocab "embed"\n {OVERLAP} }}')
    row = next(item for item in compile(loads(written, "x.plan")).asked if item.request == "overlap = on")
    assert row.outcome == "refused"
    assert row.detail == "0 of 1 collective in pieces, 0 behind other work, 1 beside no product"


BIG = """
model "dsl_examples.models.llama:Llama" { layers = 4, dim = 4096, heads = 32, kv_heads = 32, vocab = 32000, hidden = 11008, context = 4096 }
input tokens : int64[1, 4096]
input labels : int64[1, 4096]
cluster { device = h100, devices = 8, intra = "100GB/s" }
mesh tp=8
tensor over tp { sequence = on, style = manual
    column "layers.*.attn.w[qkv]", "layers.*.mlp.w[13]"
    row "layers.*.attn.wo", "layers.*.mlp.w2"
    vocab "embed", "head" }
"""


def test_on_a_cluster_starts_move_as_far_as_it_takes_to_hide_them() -> None:
    """A Llama of 7B: one weight gradient hides a reduction, the next one a gather, and three small ones a reduction; the
    first gather stays exposed, unless it is in pieces."""
    kind = compile(loads(BIG, "big.plan")).linked.kinds["layers"]
    found = list(under_way(kind.code.backward).values())
    assert [between.count("product_into") for between in found] == [1, 1, 3]
    pieces = compile(loads(BIG.replace("style = manual", OVERLAP), "big.plan")).linked.kinds["layers"]
    forward, backward = (
        [exposed(nodes, kind) for nodes in both]
        for both in (
            (kind.recorded.forward, kind.code.forward, pieces.code.forward),
            (kind.recorded.backward, kind.code.backward, pieces.code.backward),
        )
    )
    assert forward[0] == forward[1] > 2 * forward[2] > 0
    assert backward[0] > 3 * backward[1] and backward[1] > 2 * backward[2] > 0


def exposed(nodes: list[Node], kind: Kind) -> float:
    """Seconds of communication that nothing hides."""
    cost = cost_of(nodes, kind.overlap.machine)
    return cost.seconds - cost.compute_s


# -- the pass on a list of nodes -------------------------------------------------------------------------------------------


MACHINE = machine(loads(plan("llama-tiny", "tp=2", True), "x.plan"), Mesh((("tp", 2),)))


class Lines:
    """Local code written down by hand."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def value(self, name: str, *shape: int) -> Value:
        return Value(name, "float32", shape)

    def add(self, name: str, op: str, *args: object, shape: tuple[int, ...] = (64, 64)) -> Value:
        out = self.value(name, *shape)
        self.nodes.append(Node(op, args, {}, [out]))
        return out


def names(nodes: list[Node]) -> list[str]:
    return [node.outputs[0].name for node in nodes]


def test_a_start_moves_up_and_a_wait_moves_down() -> None:
    lines = Lines()
    x, w = lines.value("x", 64, 64), lines.value("w", 64, 64)
    early = lines.add("early", "aten.mm.default", x, w)
    h = lines.add("h", "aten.mm.default", x, w)
    y = lines.add("y", "planc.all_reduce", h, ("tp",), "sum")
    z = lines.add("z", "aten.mul.Tensor", y, y)
    late = lines.add("late", "aten.mm.default", w, w)
    assert names(behind(lines.nodes, [], [early, z, late], MACHINE)) == ["h", "y_work", "early", "late", "y", "z"]


def test_a_product_hides_one_collective_and_starts_keep_their_order() -> None:
    lines = Lines()
    x, w = lines.value("x", 64, 64), lines.value("w", 64, 64)
    free = lines.add("free", "aten.mm.default", x, w)
    y = lines.add("y", "planc.all_reduce", x, ("tp",), "sum")
    z = lines.add("z", "planc.all_reduce", w, ("tp",), "sum")
    order = names(behind(lines.nodes, [], [free, y, z], MACHINE))
    assert order.index("y_work") < order.index("free") < order.index("y")
    assert "z_work" not in order and order.index("y_work") < order.index("z")


def test_modules_that_run_as_they_are_keep_their_order() -> None:
    lines = Lines()
    x, w = lines.value("x", 64, 64), lines.value("w", 64, 64)
    first = lines.add("first", "planc.opaque", x)
    second = lines.add("second", "planc.opaque", w)
    y = lines.add("y", "planc.all_reduce", second, ("tp",), "sum")
    free = lines.add("free", "aten.mm.default", first, w)
    order = names(behind(lines.nodes, [], [first, y, free], MACHINE))
    assert order == ["first", "second", "y_work", "free", "y"]


def test_code_that_writes_into_its_views_is_left_alone() -> None:
    kind = compiled("llama-tiny", "tp=2", True).linked.kinds["layers"]
    kind.recorded.ordered = True
    assert kind.overlap.code(kind.recorded) is kind.recorded


# -- what runs -------------------------------------------------------------------------------------------------------------


class Traced(Work):
    def __init__(self, work: Work, label: str, trace: list[str]):
        self.work, self.label, self.trace = work, label, trace

    def wait(self) -> None:
        self.trace.append(f"wait {self.label}")
        self.work.wait()


def test_products_run_while_a_collective_is_under_way(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the transport's calls and of the kernels that one rank starts."""
    compilation = compiled("llama-tiny", "tp=2", True, overlap=False)
    program = load(compilation.write(tmp_path / "program"))
    traces: dict[int, list[str]] = {0: [], 1: []}

    def reduce_scatter(self, out, tensor, group, op="sum", wait=True, label=None):
        trace = traces[self.rank]
        trace.append(f"start {label}")
        work = original(self, out, tensor, group, op, wait, label)
        return work if wait else Traced(work, label, trace)

    original = InProcessTransport.reduce_scatter
    monkeypatch.setattr(InProcessTransport, "reduce_scatter", reduce_scatter)

    def step(session) -> None:
        into, trace = session.context.product_into, traces[session.context.transport.rank]

        def product_into(position, a, b):
            trace.append("product")
            return into(position, a, b)

        session.context.product_into = product_into
        session.step(random_batch(program, 0))

    simulate(program, step)
    assert traces[0] == traces[1]
    backward = [line for line in traces[0] if "backward layers.0" in line or line == "product"]
    first = next(k for k, line in enumerate(backward) if line.startswith("start backward layers.0"))
    assert backward[first + 1] == "product" and backward[first + 2] == "product"
    assert next(line for line in backward[first + 1 :] if line != "product").startswith("wait backward layers.0")
