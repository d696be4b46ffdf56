"""Sampling, loading and the datasets."""

import math
import sysconfig
import threading
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data import DataError, Loader, Sampler, SamplerState, Synthetic, TextBytes, open_dataset
from runtime.data.prefetch import Prefetcher
from runtime.program import Input

# -- sampler -----------------------------------------------------------------------------------------------------------

samplers = st.fixed_dictionaries(
    {
        "n_samples": st.integers(1, 50),
        "global_batch": st.integers(1, 20),
        "seed": st.integers(0, 2**40),
        "shuffle": st.booleans(),
    }
)


@given(samplers, st.integers(1, 5))
def test_every_sample_exactly_once_per_epoch_at_any_number_of_ranks(options, ways):
    sampler = Sampler(**options)
    for epoch in range(2):
        seen = Counter()
        for _ in range(sampler.steps_per_epoch):
            batch = sampler.next_batch()
            assert batch.epoch == epoch
            assert len(batch.indices) == options["global_batch"]
            assert all(0 <= index < options["n_samples"] for index in batch.indices)
            rows = -(-options["global_batch"] // ways)
            for rank in range(ways):
                mine = range(rank * rows, (rank + 1) * rows)
                seen.update(batch.indices[row] for row in mine if row < batch.valid)
        assert seen == Counter(range(options["n_samples"]))


@given(samplers, st.integers(0, 12), st.sampled_from(["pad", "drop"]))
def test_the_state_continues_exactly(options, steps, tail):
    if tail == "drop" and options["n_samples"] < options["global_batch"]:
        tail = "pad"
    whole = Sampler(**options, tail=tail)
    batches = [whole.next_batch() for _ in range(steps + 5)]
    state = batches[steps - 1].state.to_dict() if steps else SamplerState().to_dict()
    resumed = Sampler(**options, tail=tail)
    resumed.load_state(state)
    assert [resumed.next_batch() for _ in range(5)] == batches[steps:]


def test_drop_leaves_the_tail_out():
    sampler = Sampler(10, 4, tail="drop")
    assert sampler.steps_per_epoch == 2
    batches = [sampler.next_batch() for _ in range(5)]
    assert [batch.epoch for batch in batches] == [0, 0, 1, 1, 2]
    assert all(batch.valid == 4 for batch in batches)


def test_a_state_may_be_resumed_with_another_batch_size():
    sampler = Sampler(12, 4)
    given_out = list(sampler.next_batch().indices)
    larger = Sampler(12, 8)
    larger.load_state(sampler.state)
    given_out += larger.next_batch().indices
    assert sorted(given_out) == list(range(12))


def test_seeds_and_epochs_shuffle_differently_and_repeatably():
    orders = [Sampler(50, 1, seed=seed).order(epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert Sampler(50, 1, seed=2).order(1) == orders[7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_samples": 0, "global_batch": 1}, "must be at least 1"),
        ({"n_samples": 3, "global_batch": 4, "tail": "drop"}, "never fill a batch of 4"),
        ({"n_samples": 3, "global_batch": 4, "tail": "wrap"}, "tail is 'pad' or 'drop'"),
    ],
)
def test_bad_samplers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampler(**options)


# -- loader ------------------------------------------------------------------------------------------------------------


class Numbers:
    """Sample k is k; `bad` raises."""

    def __init__(self, n, bad=None):
        self.n, self.bad = n, bad

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError("unreadable")
        return {"x": torch.tensor([index, index]), "table": torch.arange(3) + index}


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
def test_ranks_together_hold_the_global_batch(n, batch, ways, prefetch):
    rows = -(-batch // ways)
    loaders = [
        Loader(Numbers(n), Sampler(n, batch), range(r * rows, (r + 1) * rows), prefetch=prefetch) for r in range(ways)
    ]
    wanted = Sampler(n, batch)
    try:
        for _ in range(4):
            parts = [next(loader) for loader in loaders]
            indices = wanted.next_batch()
            joined = torch.cat([part.tensors["x"][:, 0] for part in parts]).tolist()
            padding = [indices.indices[-1]] * (rows * ways - batch)
            assert joined == [*indices.indices, *padding]
            assert {part.valid for part in parts} == {indices.valid}
            assert all(loader.state == indices.state for loader in loaders), "the state ignores what is prefetched"
    finally:
        for loader in loaders:
            loader.close()


def test_batch_dimensions():
    with Loader(Numbers(8), Sampler(8, 4, shuffle=False), range(2, 4), {"x": 1, "table": None}) as loader:
        batch = next(loader)
    assert batch.tensors["x"].tolist() == [[2, 3], [2, 3]]
    assert batch.tensors["table"].tolist() == [0, 1, 2], "the same on every rank"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_of_the_dataset_name_the_sample(prefetch):
    with Loader(Numbers(8, bad=5), Sampler(8, 4, shuffle=False), prefetch=prefetch) as loader:
        next(loader)
        with pytest.raises(DataError, match="failed at sample 5 of 8: OSError: .*unreadable"):
            next(loader)


def test_samples_of_different_shapes_are_reported():
    class Ragged(Numbers):
        def __getitem__(self, index):
            return {"x": torch.zeros(index)}

    with Loader(Ragged(3), Sampler(3, 3, shuffle=False), prefetch=0) as loader, pytest.raises(DataError) as caught:
        next(loader)
    assert "input 'x' has the shapes (0,), (1,), (2,)" in str(caught.value)


def test_the_prefetcher_is_bounded_and_ends():
    made = []

    def produce():
        made.append(len(made))
        return made[-1]

    before = threading.active_count()
    prefetcher = Prefetcher(produce, 3)
    time.sleep(0.1)
    assert len(made) == 3
    assert [prefetcher.next() for _ in range(5)] == list(range(5))
    prefetcher.close()
    prefetcher.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        prefetcher.next()


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "b" / "x.py").write_bytes(b"cdefg")
    (tmp_path / "a.py").write_bytes(b"ab")
    (tmp_path / "a.txt").write_bytes(b"no")
    (tmp_path / "site-packages" / "y.py").write_bytes(b"no")
    return tmp_path


def test_text_is_read_in_the_order_of_paths(folder):
    data = TextBytes(folder, 3)
    assert (data.n_bytes, data.n_labels, len(data)) == (7, 6, 2)
    assert bytes(data[0]["tokens"].tolist()) == b"abc"
    assert bytes(data[0]["labels"].tolist()) == b"bcd"
    assert bytes(data[1]["labels"].tolist()) == b"efg"


@given(st.integers(1, 9), st.booleans())
def test_every_label_is_in_exactly_one_sample(seq, shift):
    with TemporaryDirectory() as root:
        Path(root, "a.py").write_bytes(b"abcdefg")
        data = TextBytes(root, seq, shift=shift)
        samples = [data[k] for k in range(len(data))]
        assert all(s["tokens"].shape == s["labels"].shape == (seq,) for s in samples)
        labels = torch.cat([s["labels"] for s in samples])
        tokens = torch.cat([s["tokens"] for s in samples])
        assert bytes(labels[labels != -100].tolist()) == b"abcdefg"[int(shift) :]
        assert bytes(tokens[: data.n_labels].tolist()) == b"abcdefg"[: data.n_labels]
        assert (tokens[data.n_labels :] == 0).all()
        assert (labels[data.n_labels :] == -100).all()
        with pytest.raises(IndexError):
            data[len(data)]


def test_unigram_entropy(tmp_path):
    (tmp_path / "a.py").write_bytes(b"aaab")
    assert TextBytes(tmp_path, 2).unigram_entropy() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


def test_the_standard_library():
    data = TextBytes("stdlib", 256, limit=200_000)
    assert data.n_bytes == 200_000
    assert 2.5 < data.unigram_entropy() < 4.0
    first = min(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda p: p.name).read_bytes()
    assert bytes(data[0]["tokens"].tolist()) == first[:256]


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no text"):
        TextBytes(tmp_path, 4)
    with pytest.raises(DataError, match="there is no folder"):
        TextBytes(tmp_path / "none", 4)


# -- sources -----------------------------------------------------------------------------------------------------------

TOKENS = Input("tokens", "int64", (8, 16), below=256)
LABELS = Input("labels", "int64", (8, 16), below=256, ignore=-1)


def opened(spec, *inputs, dataset=None, **options):
    return open_dataset(spec, inputs, resolve=lambda name: lambda: dataset, **options)


def test_synthetic_samples_depend_on_seed_and_index_alone():
    inputs = [
        Input("ids", "int64", (4, 5), below=7),
        Input("image", "bfloat16", (3, 4, 2), batch_dim=1),
        Input("flag", "bool", (4,)),
        Input("table", "float64", (2, 2), batch_dim=None),
    ]
    data = opened("synthetic", *inputs, seed=3, samples=40)
    assert isinstance(data, Synthetic)
    assert len(data) == 40
    sample = data[7]
    assert {name: (tuple(t.shape), t.dtype) for name, t in sample.items()} == {
        "ids": ((5,), torch.int64),
        "image": ((3, 2), torch.bfloat16),
        "flag": ((), torch.bool),
        "table": ((2, 2), torch.float64),
    }
    again = opened("synthetic", *inputs, seed=3)[7]
    assert all(torch.equal(sample[name], again[name]) for name in sample)
    assert not torch.equal(sample["table"], opened("synthetic", *inputs, seed=4)[7]["table"])
    ids = torch.cat([data[k]["ids"] for k in range(40)])
    assert (ids.min(), ids.max()) == (0, 6)


def test_text_fits_the_programs_inputs(folder):
    data = opened(f"text:{folder}", LABELS, TOKENS)
    assert data.names == ("tokens", "labels")
    assert data[0]["labels"].tolist() == [*b"bcdefg", *[-1] * 10]


def test_text_for_models_that_shift_their_labels(folder):
    ids = Input("input_ids", "int64", (8, 4))
    data = opened(f"text:{folder}", ids, Input("labels", "int64", (8, 4)))
    assert torch.equal(data[0]["input_ids"], data[0]["labels"])
    assert set(opened(f"text:{folder}", ids)[0]) == {"input_ids"}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([Input("image", "float32", (8, 3, 4))], "text needs one input"),
        ([TOKENS, Input("labels", "int64", (8,))], "text needs one input"),
        ([TOKENS, Input("labels", "int64", (8, 5))], "text needs one input"),
        ([Input("tokens", "int64", (8, 16), below=100)], "must be below 100"),
    ],
)
def test_text_that_does_not_fit_is_refused(folder, inputs, message):
    with pytest.raises(DataError, match=message):
        opened(f"text:{folder}", *inputs)


def test_a_users_dataset():
    inputs = Input("x", "int64", (8, 2)), Input("table", "int64", (3,), batch_dim=None)
    assert len(opened("mine:make", *inputs, dataset=Numbers(5))) == 5
    with pytest.raises(DataError, match="but not y"):
        opened("mine:make", Input("y", "int64", (8, 2)), dataset=Numbers(5))
    with pytest.raises(DataError, match=r"x has shape \[2\], but the program needs \[3\]"):
        opened("mine:make", Input("x", "int64", (8, 3)), dataset=Numbers(5))
    with pytest.raises(DataError, match="no length"):
        opened("mine:make", *inputs, dataset=iter([]))
    with pytest.raises(DataError, match="empty"):
        opened("mine:make", *inputs, dataset=[])
