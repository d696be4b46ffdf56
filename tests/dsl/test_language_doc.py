"""docs/language.md: its plans are plans, and its tables say what the compiler checks."""

import re
from pathlib import Path

import pytest

from compiler.dsl import format_text, loads
from compiler.dsl.reference import refresh, tables
from compiler.dsl.schema import STATEMENTS
from tests.dsl.plan_cases import complete

PATH = Path(__file__).parents[2] / "docs" / "language.md"
TEXT = PATH.read_text("utf-8")
PLANS = [
    pytest.param(m[1], id=f"line {TEXT.count(chr(10), 0, m.start()) + 1}")
    for m in re.finditer(r"^```plan\n(.*?)^```", TEXT, re.M | re.S)
]


@pytest.mark.parametrize("text", PLANS)
def test_an_example_is_a_plan_in_the_standard_layout(text):
    words = ("model", "input") if re.search(r"^mesh", text, re.M) else ("model", "input", "mesh")
    plan = loads(complete(text, words))
    uses_all = "W001" not in {w.code for w in plan.warnings}
    assert uses_all
    formatted = format_text(text)
    assert re.sub(" +", " ", formatted) == re.sub(" +", " ", text)


def test_the_tables_are_up_to_date():
    assert refresh(TEXT) == TEXT, "run: python -m compiler.dsl.reference docs/language.md"


def test_every_table_and_statement_is_in_the_document():
    assert {m[1] for m in re.finditer(r"<!-- table: (\S+) -->", TEXT)} == set(tables())
    headings = re.findall(r"^### (.+)$", TEXT, re.M)
    assert set(STATEMENTS) <= {word for line in headings for word in line.split(", ")}
