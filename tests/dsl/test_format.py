"""`planc fmt`."""

import pytest

from compiler.diagnostics import PlanError
from compiler.dsl import format_text

UGLY = """\ufeff


#  heading
model   "m:M"{layers=2,dim = 8*( 3+-1 ),}   # the model
batch=32# batch
sequence = 2048      # length


# inputs
input  tokens:int64[ batch,sequence ]
mesh  pp = 2,dp=2

tensor over tp
{   # split

  # columns
  column "a"  ,"b",   # both
         "c"
    row "d"  ,

  sequence=on,overlap = off   # switches
  style=auto

  # the end
}
optimizer adamw{ betas=(0.9,
0.95),
lr = 2**-3 }
recompute "x" , "y"= fit( 70GB )
train { }


# last
"""

PRETTY = """\
#  heading
model "m:M" { layers = 2, dim = 8 * (3 + -1) }  # the model
batch    = 32                                   # batch
sequence = 2048                                 # length

# inputs
input tokens : int64[batch, sequence]
mesh pp=2, dp=2

tensor over tp {  # split
    # columns
    column "a", "b",  # both
        "c"
    row    "d"

    sequence = on, overlap = off  # switches
    style = auto

    # the end
}
optimizer adamw {
    betas = (0.9,
        0.95)
    lr    = 2**-3
}
recompute "x", "y" = fit(70GB)
train {}

# last
"""


def test_the_standard_layout():
    assert format_text(UGLY) == PRETTY


def test_it_changes_nothing_twice():
    assert format_text(PRETTY) == PRETTY


def test_crlf_and_empty_texts():
    assert format_text("a = 1\r\nb = 2\r\n") == "a = 1\nb = 2\n"
    assert format_text("") == "" and format_text("\n\n") == ""
    assert format_text("# only\n\n\n\n# comments") == "# only\n\n# comments\n"


def test_a_comment_between_a_statement_and_its_brace():
    assert format_text("data over dp  # why\n{ tail = drop }") == (
        "data over dp {  # why\n    tail = drop\n}\n"
    )


def test_a_text_with_syntax_errors_is_refused():
    with pytest.raises(PlanError) as caught:
        format_text("data over\nmodel")
    assert len(caught.value.diagnostics) == 2


def test_names_that_are_undefined_do_not_matter():
    assert format_text("input x:int64[nothing]") == "input x : int64[nothing]\n"
