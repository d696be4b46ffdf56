"""The verifier of streams: sound ones pass, and each kind of error is found and said."""

from __future__ import annotations

import dataclasses

import pytest

from compiler.analysis.stream_rules import Code, Fault, Part, StageRules
from compiler.analysis.streams import StreamError, stream_faults
from runtime.instructions import OPERATIONS, parse_stream
from runtime.program import Bucket, Call, Message, Output, Parameter, Program

F64 = ("float64", (4, 4))
CODES = {
    "first": Code(
        (0,),
        {"backward": Part((1,), (1,)), "backward_input": Part((1,), ()), "backward_weight": Part((), (1,))},
        (F64, F64), (F64,),
    ),
    "last": Code(
        (0,),
        {"backward": Part((0, 1), (0, 1)), "backward_input": Part((0, 1), (0,)), "backward_weight": Part((), (1,))},
        (F64, F64), (("float64", ()),),
    ),
}  # fmt: skip


def program(**changes) -> Program:
    """Two stages, two micro-batches, two ranks of data: stage 0 makes x from w0, stage 1 the loss from x and w1."""
    buckets = tuple(Bucket(f"b{k}", "float64", ("dp",), (f"w{k}",), 0, 16, stages=(k,)) for k in (0, 1))
    return dataclasses.replace(
        Program(
            name="two", mesh={"pp": 2, "dp": 2}, microbatches=2, batch=8, rows=8, ragged=False, full_batches=False,
            batch_axes=("dp",), model={}, inputs=(), ties={}, buffers=(), constants=(), kinds={}, prologue=None,
            parameters=tuple(Parameter(f"w{k}", (4, 4), "float64", True, stages=(k,)) for k in (0, 1)),
            outputs=(Output("loss", "loss", ("pp", "dp"), stage=1),),
            calls=(
                Call("a", "first", ("batch:i", "param:w0"), ("x",), ("param:w0",), stages=(0,)),
                Call("b", "last", ("x", "param:w1"), ("loss",), ("x", "param:w1"), stages=(1,)),
            ),
            buckets=buckets, optimizer={"name": "sgd"}, clip=None, train={}, pipeline="pp",
            messages=(Message("x", *F64), Message("d:x", *F64)),
        ),
        **changes,
    )  # fmt: skip


ZERO = """
forward a @0; send x @0 >1; recv d:x @0 <1; forward a @1; send x @1 >1; recv d:x @1 <1
wait send x @0 >1; drop x @0; wait recv d:x @0 <1; backward a @0
wait send x @1 >1; drop x @1; wait recv d:x @1 <1; backward a @1
reduce b0; wait reduce b0; step b0; report
"""
ONE = """
recv x @0 <0; recv x @1 <0
wait recv x @0 <0; forward b @0; backward b @0; drop x @0; send d:x @0 >0
wait recv x @1 <0; forward b @1; backward b @1; drop x @1; send d:x @1 >0
reduce b1; wait send d:x @0 >0; wait send d:x @1 >0; wait reduce b1; step b1; report
"""


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.replace(";", "\n").splitlines() if line.strip()]


def faults(zero: str | list[str] = ZERO, one: str | list[str] = ONE, of: Program | None = None) -> list[str]:
    texts = ["\n".join(lines(s) if isinstance(s, str) else s) for s in (zero, one)]
    streams = tuple(tuple(parse_stream(text)) for text in texts)
    return [str(fault) for fault in stream_faults(dataclasses.replace(of or program(), streams=streams), CODES)]


def test_a_sound_program():
    assert faults() == []


def test_every_instruction_is_known():
    assert all(hasattr(StageRules, f"do_{op}") for op in OPERATIONS)


def without(text: str, line: str) -> list[str]:
    found = lines(text)
    found.remove(line)
    return found


def moved(text: str, line: str, before: str) -> list[str]:
    found = without(text, line)
    found.insert(found.index(before), line)
    return found


def also(text: str, line: str, before: str) -> list[str]:
    found = lines(text)
    found.insert(found.index(before), line)
    return found


@pytest.mark.parametrize(
    "zero, one, said",
    [
        (without(ZERO, "wait recv d:x @0 <1"), ONE, "reads the gradient of x @0, whose receive is not waited for"),
        (ZERO, without(ONE, "wait recv x @1 <0"), "reads x @1, whose receive is not waited for"),
        (ZERO, moved(ONE, "drop x @0", "backward b @0"), "reads x @0, which line 5 has dropped"),
        (moved(ZERO, "send x @0 >1", "forward a @0"), ONE, "reads x @0, which is not there yet"),
        (ZERO, also(ONE, "drop x @0", "report"), "there is no x @0 to drop"),
        (ZERO, without(ONE, "wait send d:x @0 >0"), "nothing waits for `send d:x @0 >0` of line 7"),
        (ZERO, also(ONE, "wait send d:x @0 >0", "report"), "nothing has started `send d:x @0 >0`"),
        (without(ZERO, "backward a @1"), ONE, "the gradient of x @1 is never used"),
        (without(ZERO, "backward a @1"), ONE, "there is no `backward a @1`"),
        (also(ZERO, "backward a @1", "reduce b0"), ONE, "is done a second time"),
        (moved(ZERO, "backward a @0", "wait recv d:x @0 <1"), ONE, "reads the gradient of x @0, whose receive"),
        (moved(ZERO, "reduce b0", "backward a @1"), ONE, "gives a gradient of w0 after the reduction of b0 has begun"),
        (without("\n".join(without(ZERO, "reduce b0")), "wait reduce b0"), ONE, "b0: its gradients are not reduced"),
        (also(ZERO, "reduce b0", "step b0"), ONE, "b0 has been reduced already"),
        (moved(ZERO, "step b0", "wait reduce b0"), ONE, "b0: its reduction is not waited for"),
        (without(ZERO, "step b0"), ONE, "b0 is never stepped"),
        (also(ZERO, "step b0", "report"), ONE, "b0 has been stepped already"),
        (also(ZERO, "step b1", "report"), ONE, "stage 0 has no such bucket"),
        (also(ZERO, "forward b @0", "report"), ONE, "stage 0 has no such call"),
        (also(ZERO, "forward a @2", "report"), ONE, "no such micro-batch"),
        (also(ZERO, "gather b0", "report"), ONE, "b0 is whole on every rank"),
        (also(ZERO, "begin b0", "report"), ONE, "the gradients of b0 are always there"),
        (also(ZERO, "free b0", "report"), ONE, "b0 stays whole"),
        (also(ZERO, "clip", "step b0"), ONE, "the program clips nothing"),
        (also(ZERO, "prologue", "forward a @0"), ONE, "the program has no prologue"),
        (moved(ZERO, "report", "step b0"), ONE, "comes after the report, which ends the step"),
        (without(ZERO, "report"), ONE, "there is no report"),
        (also(ZERO, "send y @0 >1", "report"), ONE, "the program has no message y"),
        (also(ZERO, "send x @0 >2", "drop x @0"), ONE, "there is no other stage 2"),
        (also(ZERO, "backward_input a @0", "backward a @0"), ONE, "repeats its backward_input"),
        (also(ZERO, "backward_weight a @0", "backward a @0"), ONE, "comes before its backward_input"),
    ],
)  # fmt: skip
def test_errors_of_one_stage(zero, one, said):
    found = faults(zero, one)
    assert any(said in fault for fault in found), found
    assert all(fault.startswith(("stage 0, ", "stage 1, ")) for fault in found)


def test_split_backwards():
    zero = ZERO.replace("backward a @0", "backward_input a @0").replace(
        "reduce b0;", "backward_weight a @0; reduce b0;", 1
    )
    assert faults(zero) == []
    assert "stage 0, at the end: there is no `backward_weight a @0`" in faults(without(zero, "backward_weight a @0"))


def test_a_message_without_a_receiver():
    zero = without("\n".join(without(ZERO, "recv d:x @1 <1")), "wait recv d:x @1 <1")
    assert any("there is no gradient of x @1" in fault for fault in faults(zero))
    more = also(ZERO, "send x @1 >1", "drop x @1")
    assert faults("\n".join(more).replace("send x @1 >1\ndrop", "send x @1 >1\nwait send x @1 >1\ndrop")) == [
        "stage 0, line 12, `send x @1 >1`: stage 1 does not receive it"
    ]


def test_messages_in_another_order():
    swapped = ONE.replace("recv x @0 <0; recv x @1 <0", "recv x @1 <0; recv x @0 <0")
    assert faults(ZERO, swapped) == [
        "stage 0, line 2, `send x @0 >1`: stage 1 receives `recv x @1 <0` (line 1) at this place of the channel"
    ]


CIRCLE = """\
stage 1, line 4, `wait recv x @1 <0`: would wait for ever:
  stage 1 waits at line 4, `wait recv x @1 <0`, for line 9 of stage 0, `send x @1 >1`
  stage 0 waits at line 4, `wait recv d:x @0 <1`, for line 8 of stage 1, `send d:x @0 >0`"""


def test_a_circle_of_waits():
    """Stage 0 wants the first gradient before it sends the second micro-batch, stage 1 that before the gradient."""
    zero = """
    forward a @0; send x @0 >1; recv d:x @0 <1
    wait recv d:x @0 <1; wait send x @0 >1; drop x @0; backward a @0
    forward a @1; send x @1 >1; recv d:x @1 <1
    wait send x @1 >1; drop x @1; wait recv d:x @1 <1; backward a @1
    reduce b0; wait reduce b0; step b0; report
    """
    one = """
    recv x @0 <0; recv x @1 <0; wait recv x @0 <0; wait recv x @1 <0
    forward b @0; backward b @0; drop x @0; send d:x @0 >0
    forward b @1; backward b @1; drop x @1; send d:x @1 >0
    reduce b1; wait send d:x @0 >0; wait send d:x @1 >0; wait reduce b1; step b1; report
    """
    (found,) = faults(zero, one)
    assert found == CIRCLE


def tied() -> Program:
    """Two weights that both stages use, each stage with a part of their gradients, beside their own."""
    plain, names = program(), ("t", "u")
    shared = tuple(Bucket(name, "float64", ("pp", "dp"), (name,), 0, 4, stages=(0, 1)) for name in names)
    references = tuple(f"param:{name}" for name in names)
    calls = tuple(
        dataclasses.replace(call, arguments=call.arguments + references, gradients=call.gradients + references)
        for call in plain.calls
    )
    parameters = tuple(Parameter(name, (4,), "float64", True, stages=(0, 1)) for name in names)
    return program(calls=calls, parameters=plain.parameters + parameters, buckets=plain.buckets + shared)


def tied_faults(first: str, second: str) -> list[str]:
    """The faults if stage 0 starts the two reductions like `first`, stage 1 like `second`."""
    codes = {
        "first": Code((0,), {"backward": Part((1, 2, 3), (1, 2, 3))}),
        "last": Code((0,), {"backward": Part((0, 1, 2, 3), (0, 1, 2, 3))}),
    }
    streams = []
    for text, own, starts in ((ZERO, "b0", first), (ONE, "b1", second)):
        ends = "wait reduce t; step t; wait reduce u; step u"
        text = text.replace(f"reduce {own};", f"reduce {own}; {starts};", 1).replace("report", f"{ends}; report")
        streams.append(tuple(parse_stream("\n".join(lines(text)))))
    return [str(fault) for fault in stream_faults(dataclasses.replace(tied(), streams=tuple(streams)), codes)]


def test_tied_weights_are_reduced_over_stages():
    assert tied_faults("reduce t; reduce u", "reduce t; reduce u") == []


def test_collectives_in_another_order():
    (found,) = tied_faults("reduce t; reduce u", "reduce u; reduce t")
    assert found == (
        "stage 0, line 16, `reduce t`: all_reduce of float64[4] t over pp, dp on stages 0, 1, but stage 1 has "
        "all_reduce of float64[4] u over pp, dp on stages 0, 1 (line 14) at this place"
    )


def test_a_collective_that_one_stage_leaves_out():
    found = tied_faults("reduce t; reduce u", "reduce t")
    assert "u: its gradients are not reduced" in found[1]


def test_types_of_messages():
    wrong = program(messages=(Message("x", "float32", (4, 4)), Message("d:x", *F64)))
    assert faults(of=wrong)[0] == "stage 0, at the end: the message x is float32[4, 4], a has float64[4, 4]"


ZERO3 = """
gather b0; wait gather b0; forward a @0; free b0
gather b0; wait gather b0; begin b0 @0; backward a @0; free b0
reduce b0 @0; wait reduce b0 @0; step b0; report
"""


def sharded(text: str, microbatches: int = 1) -> list[str]:
    bucket = Bucket("b0", "float64", ("dp",), ("w0",), 0, 16, ("dp",), 3)
    alone = program(
        mesh={"dp": 2}, pipeline="", microbatches=microbatches, buckets=(bucket,), messages=(),
        outputs=(Output("loss", "x", ("dp",)),), calls=(program().calls[0],), parameters=(Parameter("w0", (4, 4), "float64", True),),
    )  # fmt: skip
    streams = (tuple(parse_stream("\n".join(lines(text) if isinstance(text, str) else text))),)
    return [str(fault) for fault in stream_faults(dataclasses.replace(alone, streams=streams), CODES)]


@pytest.mark.parametrize(
    "text, said",
    [
        (without(ZERO3, "gather b0"), "nothing has started `gather b0`"),
        ("\n".join(lines(ZERO3)[2:]), "reads w0, but b0 is not gathered"),
        (without(ZERO3, "wait gather b0"), "reads w0, but the gather of b0 is not waited for"),
        (without(ZERO3, "free b0"), "b0 is gathered already"),
        (without(ZERO3, "begin b0 @0"), "gives a gradient of w0, but the gradients of b0 did not begin"),
        (also(ZERO3, "begin b0 @0", "backward a @0"), "the gradients of b0 are there already"),
        (also(ZERO3, "free b0", "report"), "b0 is not whole"),
        (without(ZERO3, "wait reduce b0 @0"), "b0: its reduction is not waited for"),
        (also(ZERO3, "gather b0", "report"), "b0 has been stepped: what it gathers is the next step's"),
    ],
)
def test_sharded_buckets(text, said):
    assert sharded(ZERO3) == []
    found = sharded(text if isinstance(text, str) else "\n".join(text))
    assert any(said in fault for fault in found), found


def test_the_error_lists_the_first_faults():
    error = StreamError([Fault(0, None, None, f"fault {k}") for k in range(12)])
    assert str(error).startswith("stage 0, at the end: fault 0\n")
    assert str(error).endswith("stage 0, at the end: fault 9\n… and 2 more")
