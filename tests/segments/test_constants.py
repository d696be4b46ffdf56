"""Constants in segments of their own: the same results, and nothing of them left beside parameters."""

from __future__ import annotations

import pytest

from compiler.analysis.verify import TOLERANCE, verify
from compiler.driver import compile
from compiler.dsl import loads
from tests.pipeline.plans import constants_apart
from tests.zoo import get, plan_text

MODELS = ["llama-tiny", "encdec-tiny", "hf-llama", "c04_mask_boundary", "c09_encdec", "resnet-tiny", "gpt-tiny"]


@pytest.mark.parametrize("name", MODELS)
def test_the_same_results(name: str) -> None:
    parts = 1 if name == "resnet-tiny" else 2
    with constants_apart():
        verdict = verify(loads(plan_text(get(name), batch=8, mesh="dp=2", microbatches=parts), "x.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


def test_what_is_moved() -> None:
    """The rotary tables of a Llama; the embedding stays."""
    plan = loads(plan_text(get("llama-tiny"), mesh="dp=1"), "x.plan")
    with constants_apart():
        segments = compile(plan).linked.segments
    assert [segment.name for segment in segments] == ["begin.constants", "begin", "layers.0", "layers.1", "end"]
    constants, begin = segments[:2]
    assert [value.name for value in constants.inputs] == ["cos", "sin"] and len(constants.outputs) == 2
    assert [value.name for value in begin.inputs] == ["embed.weight", "tokens"]
    assert all(value in segments[2].inputs for value in constants.outputs)
