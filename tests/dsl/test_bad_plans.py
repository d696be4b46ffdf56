"""Every bad plan in bad/ gives exactly the diagnostics that it lists, with line and column."""

import pytest
from tests.dsl.plan_cases import all_cases

from compiler.diagnostics import CODES, PlanError, render, to_json
from compiler.dsl import loads

CASES = all_cases()


def test_there_are_many_cases():
    assert len(CASES) >= 200
    assert len({case.title for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.file.stem}: {c.title}")
def test_bad_plan(case):
    with pytest.raises(PlanError) as caught:
        loads(case.text, sets=case.sets)
    errors = [d for d in caught.value.diagnostics if d.severity == "error"]
    errors.sort(key=lambda d: d.span)
    found = [(d.code, d.span.line, d.span.column, d.message) for d in errors]
    assert found == [(e.code, e.line, e.column, e.text) for e in case.expected]
    assert all(d.code in CODES for d in caught.value.diagnostics)
    assert render(caught.value.diagnostics, caught.value.sources)
    assert len(to_json(caught.value.diagnostics)) == len(caught.value.diagnostics)


def test_every_error_code_of_the_language_has_a_case():
    from compiler.dsl.codes import CODES as language

    tested = {e.code for case in CASES for e in case.expected}
    elsewhere = {"E001", "E002", "E003"}  # files: test_files.py
    assert {c for c in language if c.startswith("E")} - tested - elsewhere == set()
