"""Context parallelism: each attention and order at 2, 3, 4 and 8 ranks, times tensor parallelism and pipelines."""

from __future__ import annotations

import math

import pytest

from tests.sweeps.grid import ATTENTIVE, FLAT, MODELS, check, strategy
from tests.zoo import get

MESHES = {
    "gather": ("cp=2", "cp=3", "cp=4", "cp=8"),
    "ring": ("cp=2", "cp=3", "cp=4", "cp=8"),
    "ulysses": ("cp=2", "cp=3", "cp=4", "cp=8"),
    "usp": ("cr=2 cu=2", "cr=4 cu=2", "cr=2 cu=4", "cr=3 cu=2"),
}
CASES = [(kind, mesh) for kind, meshes in MESHES.items() for mesh in meshes]
HEADS = {"llama-odd-tiny": (3, 1), "c09_encdec": (4, 4)} | dict.fromkeys(
    ("llama-tiny", "hf-llama", "hf-qwen3", "hf-gemma3"), (4, 2)
)
"""Heads of queries, and of keys and values; the other models have two of each."""
WITH = {
    "alone": (),
    "tp=2": (strategy("tensor over tp", style="auto", sequence="on"),),
    "pp=2": (strategy("pipeline over pp", schedule="1f1b", microbatches=2),),
}


def context(kind: str, order: str) -> str:
    return strategy(f"context over {'cr, cu' if kind == 'usp' else 'cp'}", attention=kind, order=order)


def refusal(name: str, kind: str, mesh: str, other: str) -> str | None:
    """E203 where fewer heads are exchanged, repeated as far as they are shared, than there are ranks that exchange them."""
    exchanging = {"ulysses": "cp", "usp": "cu"}.get(kind)
    if exchanging is None:
        return None
    ranks = dict(axis.split("=") for axis in mesh.split())
    heads, shared = HEADS.get(name, (2, 2))
    return "E203" if int(ranks[exchanging]) * math.gcd(2 if other == "tp=2" else 1, shared) > heads else None


@pytest.mark.parametrize("other", WITH)
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("kind", "mesh"), CASES)
@pytest.mark.parametrize("name", ATTENTIVE)
def test_attentions(name: str, kind: str, mesh: str, order: str, other: str) -> None:
    refused = refusal(name, kind, mesh, other)
    mesh = mesh if other == "alone" else f"{other} {mesh}" if other == "pp=2" else f"{mesh} {other}"
    cut = ('segment "*"',) if other == "pp=2" and name in FLAT else ()
    check(get(name), mesh, context(kind, order), *WITH[other], *cut, batch=4, refused=refused)


@pytest.mark.parametrize("kind", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ATTENTIVE])
def test_the_rest_of_the_zoo(name: str, kind: str) -> None:
    check(get(name), "cp=2", context(kind, "zigzag"), batch=8)
