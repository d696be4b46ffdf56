"""Constants in segments of their own."""

from __future__ import annotations

import pytest

from compiler.analysis.verify import TOLERANCE, verify
from compiler.dsl import loads
from tests.pipeline.plans import compiled
from tests.zoo import get, plan_text


@pytest.mark.parametrize("name", ["encdec-tiny", "hf-llama", "c04_mask_boundary", "c33_doc_mask", "resnet-tiny"])
def test_the_same_results(name: str) -> None:
    parts = 1 if name == "resnet-tiny" else 2
    text = plan_text(get(name), batch=8, mesh="dp=2 pp=2", extra=f"pipeline over pp {{ microbatches = {parts} }}")
    verdict = verify(loads(text, "x.plan"), steps=2)
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


def test_what_is_moved() -> None:
    """The rotary tables of a Llama; the embedding stays."""
    segments = compiled("llama-tiny", 2).linked.segments
    assert [segment.name for segment in segments] == ["begin.constants", "begin", "layers.0", "layers.1", "end"]
    constants, begin = segments[:2]
    assert [value.name for value in constants.inputs] == ["cos", "sin"] and len(constants.outputs) == 2
    assert [value.name for value in begin.inputs] == ["embed.weight", "tokens"]
    assert all(value in segments[2].inputs for value in constants.outputs)
