"""Any text gives a plan or a `PlanError`; formatting never changes what a plan means."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.dsl.plan_cases import all_cases
from tests.dsl.test_plan import LLAMA

from compiler.diagnostics import PlanError, render
from compiler.dsl import format_text, loads

FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
PIECES = [
    "model", "input", "mesh", "data", "zero", "tensor", "train", "over", "dp", "batch", "=", "==",
    "{", "}", "(", ")", "[", "]", ",", ":", "\n", "\n\n", " ", "\t", "#", '"', "'", "\\", "1", "1_",
    "25MB", "1e9", "9" * 30, "**", "//", "-", "+", "/", "*", "%", "on", "none", "include", "fit",
    "\0", "\r", "\ufeff", "漢", "\u2028", "clip", "recompute", "optimizer", "adamw", "split before",
    '"a.*"', "mode", "stage", "microbatches",
]  # fmt: skip


def check(text, sets=()):
    """Loads `text`, rendering what is wrong; formats it if that is possible."""
    try:
        plan = loads(text, sets=sets)
    except PlanError as error:
        assert error.diagnostics and render(error.diagnostics, error.sources)
        assert all(d.span is not None for d in error.diagnostics)
        plan = None
    try:
        formatted = format_text(text)
    except PlanError:
        assert plan is None
        return
    assert format_text(formatted) == formatted
    if plan is not None:
        assert loads(formatted) == loads(text)
        assert comments(formatted) == comments(text)


def comments(text):
    """The comments of a text, roughly: strings hold no `#` in these tests."""
    return [line[line.index("#") :].rstrip() for line in text.splitlines() if "#" in line]


@FEW
@given(st.text(max_size=200))
def test_any_text(text):
    check(text)


@FEW
@given(st.binary(max_size=200))
def test_any_bytes(data):
    check(data.decode("latin-1"))


@FEW
@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
def test_any_pieces_of_the_language(text):
    check(text)


@FEW
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_a_plan_with_slips(seed, slips):
    rng = random.Random(seed)
    text = LLAMA
    for _ in range(slips):
        at = rng.randrange(len(text))
        end = at + rng.randrange(4)
        text = text[:at] + rng.choice([*PIECES, ""]) + text[end:]
    check(text)


@FEW
@given(st.integers(0, 2**32))
def test_formatting_keeps_the_meaning_of_other_layouts(seed):
    rng = random.Random(seed)
    text = ""
    for line in LLAMA.split("\n"):
        spaces = " " * rng.randrange(4)
        line = line.replace(" = ", rng.choice(["=", " = ", "  =   "])).replace("{ ", "{" + spaces)
        comment = rng.choice(["", "", "  # remark", "# x" if line else ""])
        text += rng.choice(["", "\n", "# above\n", "\n\n# apart\n\n"] if not spaces else [""])
        text += spaces + line + ("" if line.endswith(",") else comment) + "\n"
    assert loads(text) == loads(LLAMA)
    check(text)


@FEW
@given(st.lists(st.text(max_size=20), max_size=3))
def test_any_sets(sets):
    try:
        loads(LLAMA, sets=sets)
    except PlanError as error:
        assert str(error)


@FEW
@given(st.sampled_from(["batch", "dp", "data.microbatches", "train.log", "model.layers", "mode"]),
       st.text(min_size=1, max_size=20))
def test_any_value_set(target, text):
    try:
        loads(LLAMA, sets={target: text})
    except PlanError as error:
        assert str(error)


def test_bad_plans_format_or_are_refused():
    for case in all_cases():
        check(case.text)


def test_large_files_take_no_more_than_linear_time():
    lines = "\n".join(f"_a{i} = {i}" for i in range(2000))
    assert len(loads(lines + "\n" * 20000 + LLAMA).names) == 2003
    check("(" * 5000)
    check("{" * 5000)
    check("}" * 5000)
    check("[{(" * 2000)
    check("_a = " + "-" * 5000 + "1")
    check('opaque "' + "a" * 100_000 + '"')
