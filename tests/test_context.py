"""Context parallelism: the sequence is cut over ranks, and everything equals one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compiler.analysis.verify import TOLERANCE, verify
from compiler.diagnostics import PlanError
from compiler.driver import Options, compile
from compiler.dsl import loads
from dsl_examples.models.llama import Llama
from runtime.data.packed import document_ids
from runtime.program import load
from runtime.simulate import simulate
from tests.test_tensor import STYLES
from tests.zoo import ZOO, get, plan_text

KINDS = ("gather", "ring", "ulysses")
ORDERS = ("contiguous", "zigzag")
MODELS = ("gpt-tiny", "llama-tiny", "llama-odd-tiny", "encdec-tiny", "vit-tiny", "hf-llama", "hf-qwen3", "hf-gemma3")


def text(
    name: str, mesh: str, kind: str = "gather", order: str = "zigzag", parts: int = 1, batch: int = 4, extra: str = ""
) -> str:
    axes = "cr, cu" if kind == "usp" else "cp"
    context = f"context over {axes} {{ attention = {kind}, order = {order} }}\n{extra}"
    return plan_text(get(name), batch=batch, mesh=mesh, microbatches=parts, extra=context)


def check(*args: object, **options: object) -> None:
    verdict = verify(loads(text(*args, **options), "context.plan"), steps=2)  # type: ignore[arg-type]
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


def suffices(name: str, ranks: int, kind: str) -> bool:
    """Whether there are as many heads as all-to-all needs."""
    heads = {"gpt-tiny": 2, "llama-odd-tiny": 3, "encdec-tiny": 2, "vit-tiny": 2}.get(name, 4)
    return kind != "ulysses" or ranks <= heads


def cases() -> list[tuple[str, int, str, str]]:
    """Each model with each kind, on 2, 3 or 4 ranks and in one of the orders; the others are in tests/sweeps."""
    found = []
    for k, name in enumerate(MODELS):
        for i, kind in enumerate(KINDS):
            ranks, order = (2, 3, 4)[(k + i) % 3], ORDERS[(k + i) % 2]
            if suffices(name, ranks, kind):
                found.append((name, ranks, kind, order))
    return found


@pytest.mark.parametrize(("name", "ranks", "kind", "order"), cases())
def test_equal_to_one_device(name: str, ranks: int, kind: str, order: str) -> None:
    check(name, f"cp={ranks}", kind, order)


@pytest.mark.parametrize("order", ORDERS)
def test_a_ring_of_all_to_alls(order: str) -> None:
    check("llama-tiny", "cr=2 cu=2", "usp", order)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["c33_doc_mask", "c36_label_shift", "gpt-attention-dropout-tiny", "c04_mask_boundary"])
def test_what_looks_at_neighbours(name: str, kind: str) -> None:
    """Masks of documents, shifted labels, dropped weights, a cumulative sum along the sequence."""
    check(name, "cp=2", kind)


def test_with_data_parallelism_and_micro_batches() -> None:
    check("gpt-tiny", "dp=2 cp=2", "ring", parts=2, batch=7)


@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=pytest.mark.full)], ids=["whole", "sequence"])
@pytest.mark.parametrize("mesh", ["cp=2 tp=2", "tp=2 cp=2", pytest.param("dp=2 cp=2 tp=2", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama-tiny", pytest.param("hf-llama", marks=pytest.mark.full)])
def test_with_tensor_parallelism(name: str, kind: str, mesh: str, sequence: bool) -> None:
    """Heads are cut by both; with sequence parallelism the sequence is, in one order."""
    tensor = f"tensor over tp {{ {STYLES[name]}\n style = manual\n sequence = {'on' if sequence else 'off'} }}"
    check(name, mesh, kind, extra=tensor)


def test_the_table_says_what_was_done() -> None:
    found = {row.request: row for row in compile(loads(text("llama-tiny", "cp=2", "ring"), "x.plan")).asked}
    assert found["context over cp"].detail == (
        "tokens, labels cut along the sequence, cp=2, zigzag, the most work of a rank 1.00 times the mean"
    )
    assert found["attention = ring"].outcome == "applied" and found["attention = ring"].detail == "2 of 2 attentions"


PACKED = """
model "dsl_examples.models.llama:Llama" { layers = 2, dim = 16, heads = 4, kv_heads = 2, vocab = 32, context = 32 }
batch = 2
seq = 24
input tokens : int64[batch, seq]
input labels : int64[batch, seq]
input documents : int64[batch, seq]
mesh cp=CP
context over cp { attention = KIND, order = ORDER }
"""
LENGTHS = ((3, 13, 8), (1, 1, 5, 17))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_packed_documents_are_as_each_by_itself(ranks: int, kind: str, order: str, tmp_path: Path) -> None:
    """The loss and all gradients are those of the documents one after the other, on one device."""
    plan = PACKED.replace("CP", str(ranks)).replace("KIND", kind).replace("ORDER", order)
    program = load(compile(loads(plan, "p.plan"), options=Options(widen=True)).write(tmp_path / "p"))
    torch.set_default_dtype(torch.float64)
    model = Llama(layers=2, dim=16, heads=4, kv_heads=2, vocab=32, context=32)
    tokens, labels = torch.randint(0, 32, (2, 2, 24)).unbind()
    documents = torch.stack([document_ids(lengths) for lengths in LENGTHS])
    total = torch.zeros(())
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            total = total + model(tokens[row : row + 1, part], labels[row : row + 1, part]) * length / labels.numel()
            start += length
    total.backward()
    batch = {"tokens": tokens, "labels": labels, "documents": documents}
    state = {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}

    def body(session):  # type: ignore[no-untyped-def]
        return session.step(batch).loss, {name: g.clone() for name, g in session.gradients().items()}

    for loss, gradients in simulate(program, body, state):
        assert abs(loss - total.item()) <= TOLERANCE * abs(total.item())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-13)


def test_too_few_heads_for_all_to_all() -> None:
    with pytest.raises(PlanError, match="needs as many heads as ranks, but the model has 4") as caught:
        compile(loads(text("llama-tiny", "cp=8", "ulysses"), "x.plan"))
    assert "attention = ulysses" in str(caught.value), "the place is the option's"


def test_shared_heads_are_repeated_for_all_to_all() -> None:
    """Two key/value heads on four ranks."""
    check("llama-tiny", "cp=4", "ulysses")


@pytest.mark.parametrize(
    ("kind", "order"), [("ring", "zigzag"), ("ring", "contiguous"), ("gather", "zigzag"), ("ulysses", "zigzag")]
)
def test_bytes_are_those_of_the_formula(kind: str, order: str, tmp_path: Path) -> None:
    """Of n ranks, with L layers, x = bytes of a rank's part of the keys and values of one layer and y of its queries:

    ring     3 L (n-1) x    keys and values, again in the backward, and their gradients; in contiguous order of causal
                            attention half of that over all ranks, since later blocks are needed by fewer ranks
    gather   2 L (n-1) x    gathered, and the gradients reduced
    ulysses  2 L (2 y + x) (n-1) / n
    """
    ranks, layers = 4, 2
    compilation = compile(loads(text("llama-tiny", f"cp={ranks}", kind, order), "x.plan"))
    program = load(compilation.write(tmp_path / "program"))

    def body(session):  # type: ignore[no-untyped-def]
        session.step(get("llama-tiny").batch(4))
        counters = session.transport.counters
        kinds = ("send", "all_gather", "reduce_scatter", "all_to_all")
        return sum(counters[name].bytes for name in kinds)

    total = sum(simulate(program, body))
    y = 4 * 4 * 2 * 4 * 4  # batch, heads, a rank's positions, width, bytes
    x = 2 * y // 2  # keys and values of half as many heads
    each = {
        "ring": 3 * (ranks - 1) * x,
        "gather": 2 * (ranks - 1) * x,
        "ulysses": 2 * (2 * y + 2 * x) * (ranks - 1) // ranks,
    }
    expected = ranks * layers * each[kind]
    assert total == (expected // 2 if order == "contiguous" else expected)


def test_memory_falls_with_the_number_of_ranks() -> None:
    """What a rank holds of activations at the peak, at a sequence that is long beside the model."""
    from compiler.analysis.dry_run import dry_run
    from compiler.analysis.memory import read_memory

    plan = (
        PACKED.replace("input documents : int64[batch, seq]\n", "").replace("ORDER", "zigzag").replace("KIND", "ring")
    )
    plan = plan.replace("seq = 24", "seq = 8192").replace("context = 32", "context = 8192")
    held = {}
    for ranks in (1, 2, 4, 8):
        memory = read_memory(dry_run(compile(loads(plan.replace("CP", str(ranks)), "x.plan"))))
        held[ranks] = memory.peak.categories["activations"]
    for ranks, found in held.items():
        assert found * ranks <= 1.05 * held[1], held


def test_a_million_tokens_compile() -> None:
    """Llama 3 8B on 128 devices, one sequence of 1,048,576 tokens; no value of a rank is as long as that but for the
    labels' count."""
    plan = """
model "dsl_examples.models.llama:Llama" {
    layers = 2, dim = 4096, heads = 32, kv_heads = 8, hidden = 14336, vocab = 128_256, context = 1_048_576
}
batch = 1
seq = 1_048_576
input tokens : int64[batch, seq]
input labels : int64[batch, seq]
mesh cp=16 tp=8
context over cp { attention = ring }
tensor over tp {
    column "layers.*.attn.w[qkv]", "layers.*.mlp.w[13]"
    row "layers.*.attn.wo", "layers.*.mlp.w2"
    vocab "embed", "head"
    sequence = on
    style = manual
}
"""
    compilation = compile(loads(plan, "million.plan"))
    for kind in compilation.linked.kinds.values():
        for node in (*kind.code.forward, *kind.code.backward):
            for out in node.outputs:
                assert (
                    out is None or max(out.shape, default=0) <= max(1_048_576 // 16, 128_256 // 8) or len(out.shape) < 3
                )
