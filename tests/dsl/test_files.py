"""Files, `include` and `--set`."""

import os

import pytest

from compiler.diagnostics import PlanError
from compiler.dsl import load, loads

BASE = """
model "m:M" { layers = 2 }
batch = 32
input tokens : int64[batch, 8]
input labels : int64[batch, 8]
mesh dp=2
data over dp { microbatches = 4 }
opaque "a"
recompute "x" = full
clip grad_norm = 1
clip grad_value = 1
"""


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def failures(path, sets=()):
    with pytest.raises(PlanError) as caught:
        load(path, sets)
    assert str(caught.value)
    return [d for d in caught.value.diagnostics if d.severity == "error"]


# --- include ---


def test_the_including_file_wins_wherever_the_include_stands(write):
    write("base.plan", BASE)
    own = 'batch = 8\nmesh dp=4\nopaque "b"\nrecompute "y" = none\ninput labels : int32[batch, 1]\n'
    own += "clip grad_norm = 2\n"
    for text in ('include "base.plan"\n' + own, own + 'include "base.plan"\n'):
        plan = load(write("top.plan", text))
        assert plan.names == {"batch": 8} and plan.ranks == 4
        assert [(i.name, i.shape, i.dtype) for i in plan.inputs] == [
            ("tokens", (8, 8), "int64"),
            ("labels", (8, 1), "int32"),
        ]
        assert [p.text for p in plan.opaque] == ["a", "b"]
        assert [r.policy for r in plan.recompute] == ["full", "none"]
        assert plan.microbatches == 4
        assert (plan.clip.grad_norm, plan.clip.grad_value) == (2, 1)
        assert plan.warnings == ()


def test_of_two_included_files_the_later_wins(write):
    write("one.plan", BASE)
    write("two.plan", "batch = 64")
    assert load(write("top.plan", 'include "one.plan"\ninclude "two.plan"')).names["batch"] == 64
    assert load(write("top.plan", 'include "two.plan"\ninclude "one.plan"')).names["batch"] == 32


def test_a_file_is_read_once(write):
    write("base.plan", BASE)
    write("sub/mid.plan", 'include "../base.plan"')
    plan = load(write("top.plan", 'include "sub/mid.plan"\ninclude "base.plan"'))
    assert [p.text for p in plan.opaque] == ["a"]


def test_a_factory_is_relative_to_the_file_that_names_it(write):
    base = write("sub/base.plan", 'model "net.py:Net"\ninput x : float32[4]')
    plan = load(write("top.plan", 'include "sub/base.plan"'))
    assert plan.model.folder == base.parent


def test_an_error_in_an_included_file_shows_both_places(write):
    write("base.plan", BASE + "zero over dp { stage = 4 }\ntrain { steps 3 }")
    top = write("top.plan", '# top\ninclude "base.plan"')
    zero, train = sorted(failures(top), key=lambda d: d.span)
    assert zero.span.file.endswith("base.plan") and zero.code == "E043"
    assert train.code == "E020"
    for error in (zero, train):
        (site,) = error.related
        assert (site.span.file, site.span.line, site.span.column) == (str(top), 2, 9)


def test_a_missing_included_file_causes_no_other_errors(write):
    top = write("top.plan", 'include "bsae.plan"\ndata over dp { microbatches = m }')
    write("base.plan", BASE)
    (error,) = failures(top, {"batch": "3"})
    assert error.code == "E001" and error.help == ("did you mean `base.plan`?",)
    assert (error.span.line, error.span.column) == (1, 9)


def test_circles(write):
    top = write("a.plan", 'include "b.plan"\n' + BASE)
    write("b.plan", 'include "a.plan"')
    (error,) = failures(top)
    assert error.code == "E003" and "a.plan → b.plan → a.plan" in error.message
    (error,) = failures(write("self.plan", 'include "self.plan"\n' + BASE))
    assert error.code == "E003"


def test_too_many_levels(write):
    for i in range(50):
        write(f"p{i}.plan", f'include "p{i + 1}.plan"')
    assert {e.code for e in failures(write("p0.plan", 'include "p1.plan"'))} >= {"E003"}


# --- files ---


def test_a_missing_file(tmp_path):
    (error,) = failures(tmp_path / "no.plan")
    assert error.code == "E001"


def test_a_folder(tmp_path):
    (error,) = failures(tmp_path)
    assert error.code == "E001"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(write):
    path = write("p.plan", BASE)
    path.chmod(0)
    assert failures(path)[0].code == "E001"


def test_not_utf8(write):
    (error,) = failures(write("p.plan", b'model "m\xff:M"'))
    assert error.code == "E002"


def test_an_included_file_that_is_not_utf8(write):
    write("base.plan", b"\xff\xfe\x00")
    (error,) = failures(write("top.plan", 'include "base.plan"'))
    assert error.code == "E002" and error.span.line == 1


# --- --set ---


@pytest.mark.parametrize(
    "sets, get, value",
    [
        ("batch=64", lambda p: p.inputs[0].shape[0], 64),
        ("batch=2*8", lambda p: p.names["batch"], 16),
        ("dp=4", lambda p: p.ranks, 4),
        ("mesh.dp=4", lambda p: p.ranks, 4),
        ("data.microbatches=2", lambda p: p.microbatches, 2),
        ("data.tail=drop", lambda p: p.data.tail, "drop"),
        ("data.bucket=1MiB", lambda p: p.data.bucket, 2**20),
        ("model.layers=4", lambda p: p.model.options["layers"], 4),
        ("model.new=on", lambda p: p.model.options["new"], True),
        ('model.name="gpt-2/x"', lambda p: p.model.options["name"], "gpt-2/x"),
        ("model.name=gpt2/x.y", lambda p: p.model.options["name"], "gpt2/x.y"),
        ("train.steps=5", lambda p: p.train.steps, 5),
        ("train.directory=runs/x", lambda p: p.train.directory, "runs/x"),
        ("train.directory=runs", lambda p: p.train.directory, "runs"),
        ("train.log=none", lambda p: p.train.log, None),
        ("train.data=text:stdlib", lambda p: p.train.data, "text:stdlib"),
        ("precision.compute=bf16", lambda p: p.precision.compute, "bfloat16"),
        ("clip.grad_norm=3", lambda p: p.clip.grad_norm, 3.0),
        ("mode=forward", lambda p: p.mode, "forward"),
    ],
)
def test_set(sets, get, value):
    assert get(loads(BASE, sets=[sets])) == value
    name, _, text = sets.partition("=")
    assert get(loads(BASE, sets={name: text})) == value


def test_set_of_a_pipeline_schedule():
    text = BASE + "mesh2 = 1\npipeline over pp\n".replace("mesh2 = 1\n", "")
    text = text.replace("mesh dp=2", "mesh dp=2 pp=2")
    assert loads(text, sets={"pipeline.schedule": "gpipe"}).pipeline.schedule == "gpipe"
    assert loads(text, sets={"pipeline.schedule": "a.csv"}).pipeline.schedule == "a.csv"
    assert loads(text, sets={"pipeline.schedule": "1f1b"}).pipeline.schedule == "1f1b"


def test_set_reaches_a_name_of_an_included_file(write):
    write("base.plan", BASE)
    top = write("top.plan", 'include "base.plan"')
    assert load(top, {"batch": "8", "train.steps": "3"}).inputs[0].shape == (8, 8)


def test_the_last_set_of_a_name_counts():
    assert loads(BASE, sets=["batch=1", "batch=2"]).names["batch"] == 2
