"""How diagnostics look, and the suggestions that they make."""

import pytest
from tests.dsl.plan_cases import complete

from compiler.diagnostics import (
    Diagnostics,
    Label,
    PlanError,
    Span,
    closest,
    declare_codes,
    render,
    summary,
    to_json,
)
from compiler.dsl import loads


def errors(text, sets=()):
    with pytest.raises(PlanError) as caught:
        loads(complete(text), sets=sets)
    return caught.value


def test_the_whole_picture():
    error = errors("data over dp\nzero over dp { stge = 3 }\n")
    assert str(error) == """
error[E032]: `zero` has no option `stge`
 --> <plan>:2:16
  |
2 | zero over dp { stge = 3 }
  |                ^^^^ not an option of `zero`
  |
  = help: did you mean `stage`?

1 error
"""


def test_a_second_place():
    error = errors("batch = 4\ninput y : int64[batch]\nbatch = 8\n")
    assert str(error) == """
error[E030]: the name `batch` is given twice
 --> <plan>:3:1
  |
3 | batch = 8
  | ^^^^^ given again here
 ::: <plan>:1:1
  |
1 | batch = 4
  | ----- first given here

1 error
"""


def test_the_second_place_may_be_a_python_file(tmp_path):
    model = tmp_path / "model.py"
    model.write_text("def f(x):\n    return x.item()\n")
    diagnostics = Diagnostics()
    diagnostics.error(
        "E999",
        "cannot capture",
        Span("p.plan", 1, 1, 1, 6),
        related=[Label(Span(str(model), 2, 12, 2, 20), "here")],
    )
    shown = render(diagnostics, {"p.plan": 'model "m:M"'})
    assert "2 |     return x.item()\n  |            -------- here" in shown


@pytest.mark.parametrize(
    "text, help",
    [
        ("data over dp { bucket = 25 }", "did you mean `25MB`?"),
        ("data over dp { bucket = 25_000_000 }", "did you mean `25MB`?"),
        ("data over dp { bucket = 25mb }", "did you mean `MB`?"),
        ("data over dp { bucket = 25MB/s }", "did you mean `25MB`?"),
        ('data over dp { bucket = "25MB" }', "write it without quotes: `25MB`"),
        ("cluster { devices = 16, flops = 989 }", "did you mean `989TFLOPS`?"),
        ("cluster { devices = 16, intra = 900GB }", "did you mean `900GB/s`?"),
        ("optimizer adamw { lr = 3MB }", "write the number without the unit `MB`"),
        ("optimizer adamw { warmup = 1e3 }", "write `1000`"),
        ("data over dp { microbatches = 8 / 2 }", "divide with `//`"),
        ("data over dq", "known here: `pp`, `dp`, `cp`, `tp`"),
        ("mesh data=2 tp=2\ndata over dta", "did you mean `data`?"),
        ("tensor over tp { sequence = 1 }", "did you mean `on`?"),
        ("modle \"m:M\"", "did you mean `model`?"),
        ("tenser over tp", "did you mean `tensor`?"),
        ("input y : int46[4]", "did you mean `int64`?"),
        ("input y : int64[bach]\nbatch = 4", "did you mean `batch`?"),
        ("pipeline over pp { schedule = 1f2b }", "did you mean `1f1b`?"),
        ("pipeline over pp { split after \"a\" }", "did you mean `split before`?"),
        ("cluster { device = h1000 }", "did you mean `h100`?"),
        ("optimizer adamv", "did you mean `adamw`?"),
        ("column \"a\"", "`column` stands inside `tensor … { }`"),
        ("train { data = synthetic }", "write `\"synthetic\"`"),
        ("model \"m:M\" { a = 32k }", "write the number in full: `32_000`"),
        ("opaque 'a'", "write `\"a\"`"),
        ("zero over dp", "add `data over dp`"),
        ("_a = 3; _b = 4", "a statement ends at the end of its line"),
        ("tensor over tp { column = \"a\" }", "it is written `column \"pattern\"`, without `=`"),
    ],
)
def test_suggestion(text, help):
    assert any(help in d.help for d in errors(text).diagnostics)


def test_an_option_that_belongs_elsewhere_is_named():
    (error,) = errors("tensor over tp { microbatches = 4 }").diagnostics[:1]
    assert error.notes == ("`microbatches` is an option of `data` and `pipeline`",)


def test_set_is_shown_as_a_source_of_its_own():
    error = errors("data over dp", sets={"data.microbatches": "0"})
    assert "--> --set:1:19\n  |\n1 | data.microbatches=0\n  |                   ^" in str(error)


def test_columns_line_up_behind_tabs_and_wide_characters():
    diagnostics = Diagnostics()
    diagnostics.error("E999", "here", Span("p", 1, 4, 1, 5))
    shown = render(diagnostics, {"p": "\t漢a!"}).split("\n")
    assert shown[3:5] == ["1 |  漢a!", "  |     ^"]


def test_a_very_long_line_is_cut_around_the_place():
    text = "x" * 5000 + "!" + "y" * 5000
    diagnostics = Diagnostics()
    diagnostics.error("E999", "here", Span("p", 1, 5001, 1, 5002))
    line, under = render(diagnostics, {"p": text}).split("\n")[3:5]
    assert len(line) < 200 and line[under.index("^")] == "!"


def test_color_and_json_and_summary():
    error = errors("data over dp { tail = padd }\nq = 1\n")
    assert "\x1b[1;31m" in render(error.diagnostics, error.sources, color=True)
    assert "\x1b" not in render(error.diagnostics, error.sources)
    assert summary(error.diagnostics) == "1 error, 1 warning"
    first = to_json(error.diagnostics)[0]
    assert first["span"] == {
        "file": "<plan>", "line": 1, "column": 23, "end_line": 1, "end_column": 27
    }  # fmt: skip


def test_closest_prefers_swapped_letters():
    assert closest("modle", ["mode", "model"]) == "model"
    assert closest("BATCH", ["batch"]) == "batch"
    assert closest("xyzzy", ["batch"]) is None


def test_closest_pattern_keeps_what_is_open():
    names = [f"blocks.{k}.{part}" for k in range(12) for part in ("attn.qkv", "attn.out", "mlp.up")]
    assert closest("blocks.*.atn.qkv", names) == "blocks.*.attn.qkv"
    assert closest("block.*.attn.*", names) == "blocks.*.attn.*"
    assert closest("layers.*.atn.w[qk]", ["layers.0.attn.wq", "layers.0.mlp.w1"]) == "layers.*.attn.w[qk]"
    assert closest("blocks.*.qkv", names) == "blocks.*.attn.qkv"
    assert closest("block.3.attn.qkv", names) == "blocks.3.attn.qkv"


def test_a_code_has_one_meaning():
    with pytest.raises(ValueError):
        declare_codes({"E001": "something else"})
