"""Context parallelism: the sequence is cut over ranks, and everything equals one device."""

from __future__ import annotations

import pytest

from compiler.analysis.verify import TOLERANCE, verify
from compiler.driver import compile
from compiler.dsl import loads
from tests.zoo import ZOO, get, plan_text

KINDS = ("gather", "ring", "ulysses")
ORDERS = ("contiguous", "zigzag")
MODELS = ("gpt-tiny", "llama-tiny", "llama-odd-tiny", "encdec-tiny", "vit-tiny", "hf-llama", "hf-qwen3")


def text(
    name: str, mesh: str, kind: str = "gather", order: str = "zigzag", parts: int = 1, batch: int = 4, extra: str = ""
) -> str:
    axes = "cr, cu" if kind == "usp" else "cp"
    context = f"context over {axes} {{ attention = {kind}, order = {order} }}\n{extra}"
    return plan_text(get(name), batch=batch, mesh=mesh, microbatches=parts, extra=context)


def check(*args: object, **options: object) -> None:
    verdict = verify(loads(text(*args, **options), "context.plan"), steps=2)  # type: ignore[arg-type]
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


def sweep() -> list:
    """Each model with each kind and order on 2 ranks in short, on 3, 4 and 8 in full."""
    cases = []
    for k, name in enumerate(MODELS):
        for ranks in (2, 3, 4, 8):
            for i, kind in enumerate(KINDS):
                for j, order in enumerate(ORDERS):
                    chosen = (k + i) % 2 == j and ranks == (2, 3, 4)[(k + i) % 3]
                    marks = () if chosen else (pytest.mark.full,)
                    cases.append(pytest.param(name, ranks, kind, order, marks=marks))
    return cases


@pytest.mark.parametrize(("name", "ranks", "kind", "order"), sweep())
def test_equal_to_one_device(name: str, ranks: int, kind: str, order: str) -> None:
    check(name, f"cp={ranks}", kind, order)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "entry", [e for e in ZOO if e.size == "tiny" and "branch" not in e.traits], ids=lambda e: e.name
)
def test_the_zoo(entry, kind: str) -> None:
    check(entry.name, "cp=2", kind)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "name",
    [
        "llama-tiny",
        pytest.param("hf-qwen3", marks=pytest.mark.full),
        pytest.param("encdec-tiny", marks=pytest.mark.full),
    ],
)
def test_a_ring_of_all_to_alls(name: str, order: str) -> None:
    check(name, "cr=2 cu=2", "usp", order)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["c33_doc_mask", "c36_label_shift", "gpt-attention-dropout-tiny", "c04_mask_boundary"])
def test_what_looks_at_neighbours(name: str, kind: str) -> None:
    """Masks of documents, shifted labels, dropped weights, a cumulative sum along the sequence."""
    check(name, "cp=2", kind)


def test_with_data_parallelism_and_micro_batches() -> None:
    check("gpt-tiny", "dp=2 cp=2", "ring", parts=2, batch=7)


def test_the_table_says_what_was_done() -> None:
    found = {row.request: row for row in compile(loads(text("llama-tiny", "cp=2", "ring"), "x.plan")).asked}
    assert found["context over cp"].detail == "tokens, labels cut along the sequence, cp=2, zigzag"
    assert found["attention = ring"].outcome == "applied" and found["attention = ring"].detail == "2 of 2 attentions"
