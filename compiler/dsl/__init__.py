"""The plan language: text to a checked `Plan`, and the formatter.

    plan = compiler.dsl.load("demo.plan", sets={"batch": "64"})
    text = compiler.dsl.format_text(text)

Both raise `compiler.diagnostics.PlanError` with every mistake that the text has.
The steps: lexer → trees → parser (syntax) → files (include) → overrides (`--set`) → check →
rules.
"""

from compiler.dsl.format import format_text
from compiler.dsl.frontend import load, loads
from compiler.dsl.plan import Plan

__all__ = ["Plan", "format_text", "load", "loads"]
