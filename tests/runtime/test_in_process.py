"""Ranks as threads: results, checks, and what happens when something goes wrong."""

import time
from functools import partial

import pytest
import torch

from runtime.transport import (
    CollectiveMismatch,
    Deadlock,
    LocalTransport,
    PeerFailure,
    RankFailure,
    TransportError,
    WaitTimeout,
    run_ranks,
)
from tests.runtime.exercise import DTYPES, exercise, operations, values


def failure(size, fn, **options):
    started = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(size, fn, **options)
    assert time.monotonic() - started < 3, "a failure must release everyone promptly"
    return caught.value


def everyone(transport):
    return tuple(range(transport.size))


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_returns_what_it_must(size):
    results = run_ranks(size, exercise)
    group = tuple(range(size))
    for dtype in DTYPES:
        inputs = torch.stack([values(rank, 2 * size, dtype).double() for rank in range(size)])
        reduced = {
            "sum": inputs.sum(0),
            "avg": inputs.mean(0).to(dtype).double(),
            "max": inputs.amax(0),
            "min": inputs.amin(0),
            "or": inputs.amax(0),
            "and": inputs.amin(0),
        }
        for rank in range(size):
            get = partial(_result, results[rank], f"{dtype} {group}")
            for op in operations(dtype):
                part = reduced[op].view(size, 2)[rank]
                assert torch.equal(get(f"reduce_scatter {op}"), part)
                assert torch.equal(get(f"reduce_scatter {op} in place"), part)
                wide = torch.stack([values(r, 6, dtype).double() for r in range(size)])
                if op == "sum":
                    assert torch.equal(get("all_reduce sum"), wide.sum(0))
            assert torch.equal(get("all_to_all"), inputs.view(size, size, 2)[:, rank].flatten())
            expected = torch.cat([values(r, 6, dtype) for r in range(size)]).double().view(-1, 2)
            assert torch.equal(get("all_gather"), expected)
            assert torch.equal(get("broadcast"), values(size - 1, 4, dtype).double())
            below = (rank - 1) % size
            ring = torch.cat([values(below + k, 3, dtype).double() for k in range(2)])
            assert results[rank][f"ring {dtype}"] == ring.tolist()
    assert results[0]["objects"] == [r + 10 * k for k in range(3) for r in range(size)]


def _result(results, suffix, kind):
    return torch.tensor(results[f"{kind} {suffix}"], dtype=torch.float64)


def test_results_do_not_depend_on_timing():
    """Sums of numbers of very different sizes round differently in each order; ours has one order."""

    def fn(transport):
        time.sleep(0.002 * ((transport.rank * 7 + round_) % 5))
        generator = torch.Generator().manual_seed(transport.rank)
        tensor = torch.randn(64, generator=generator) * 10.0 ** (transport.rank % 7)
        transport.all_reduce(tensor, everyone(transport))
        return tensor

    seen = []
    for round_ in range(4):
        seen += run_ranks(8, fn)
    assert all(torch.equal(seen[0], other) for other in seen)


def test_sixteen_bit_sums_are_rounded_once():
    def fn(transport):
        tensor = torch.tensor([256.0 if transport.rank == 0 else 1.0], dtype=torch.bfloat16)
        transport.all_reduce(tensor, everyone(transport))
        return tensor.item()

    assert run_ranks(9, fn) == [264.0] * 9  # In bfloat16, 256 + 1 is 256.


def test_many_ranks_in_seconds():
    def fn(transport):
        group = everyone(transport)
        row = tuple(r for r in group if r // 8 == transport.rank // 8)
        for step in range(20):
            tensor = torch.full((8,), float(transport.rank))
            work = transport.all_reduce(tensor, group, wait=False, label=f"reduce {step}")
            part = torch.full((4,), 1.0)
            transport.all_reduce(part, row)
            work.wait()
        return tensor[0].item() + part[0].item()

    started = time.monotonic()
    assert run_ranks(64, fn) == [2016.0 + 8.0] * 64
    assert time.monotonic() - started < 10


def test_async_results_appear_at_the_wait_and_not_before():
    def fn(transport):
        tensor = torch.tensor([float(transport.rank + 1)])
        work = transport.all_reduce(tensor, everyone(transport), wait=False)
        transport.barrier()
        before = tensor.item()
        work.wait()
        work.wait()
        return before, tensor.item()

    assert run_ranks(2, fn) == [(1.0, 3.0), (2.0, 3.0)]


def test_async_operations_never_block_their_caller():
    """Two ranks start the same operations in the same order but wait in opposite orders, and both send first."""

    def fn(transport):
        other = 1 - transport.rank
        a, b, inbox = torch.ones(2), torch.ones(3), torch.zeros(4)
        works = [
            transport.send(torch.full((4,), float(transport.rank)), other, wait=False),
            transport.all_reduce(a, (0, 1), wait=False),
            transport.all_reduce(b, (0, 1), wait=False),
            transport.recv(inbox, other, wait=False),
        ]
        for work in works if transport.rank else reversed(works):
            work.wait()
        return a.sum().item() + b.sum().item() + inbox[0].item()

    assert run_ranks(2, fn) == [11.0, 10.0]


def test_grad_mode_and_leaves_do_not_matter():
    def fn(transport):
        leaf = torch.ones(2, requires_grad=True)
        transport.all_reduce(leaf, everyone(transport))
        return leaf.is_leaf, leaf.tolist()

    assert run_ranks(2, fn) == [(True, [2.0, 2.0])] * 2


def test_the_number_of_torch_threads_is_restored():
    before = torch.get_num_threads()
    run_ranks(3, lambda transport: None)
    assert torch.get_num_threads() == before


def test_counters_follow_the_ring_formulas():
    def fn(transport):
        group = everyone(transport)
        full, part = torch.zeros(8), torch.zeros(2)
        transport.all_reduce(full, group)
        transport.all_gather(full, part, group)
        transport.reduce_scatter(part, full, group)
        transport.all_to_all(torch.zeros(8), full, group)
        transport.all_reduce(full, (transport.rank,))
        if transport.rank < 2:
            transport.send(part, 1) if transport.rank == 0 else transport.recv(part, 0)
        counters = transport.counters
        kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv")
        seen = {kind: (counters[kind].calls, counters[kind].bytes) for kind in kinds}
        assert counters.by_group()["all_reduce", group].bytes == 48
        counters.reset()
        assert counters.total.calls == 0
        return seen

    first, second, *_ = run_ranks(4, fn)
    common = {"all_reduce": (1, 48), "all_gather": (1, 24), "reduce_scatter": (1, 24), "all_to_all": (1, 24)}
    assert first == {**common, "send": (1, 8), "recv": (0, 0)}
    assert second == {**common, "send": (0, 0), "recv": (1, 0)}


# -- disagreement ------------------------------------------------------------------------------------------------------


def ones(n=3, dtype=torch.float32):
    return torch.ones(n, dtype=dtype)


MISMATCHES = {
    "kind": (
        lambda t: t.all_reduce(ones(), (0, 1)),
        lambda t: t.broadcast(ones(), (0, 1), 0),
        ["rank 0: all_reduce(f32[3], sum)", "rank 1: broadcast(f32[3], from rank 0)"],
    ),
    "shape": (
        lambda t: t.all_reduce(ones(3), (0, 1)),
        lambda t: t.all_reduce(ones(4), (0, 1)),
        ["f32[3]", "f32[4]"],
    ),
    "dtype": (
        lambda t: t.all_reduce(ones(), (0, 1)),
        lambda t: t.all_reduce(ones(dtype=torch.bfloat16), (0, 1)),
        ["f32[3]", "bf16[3]"],
    ),
    "op": (lambda t: t.all_reduce(ones(), (0, 1)), lambda t: t.all_reduce(ones(), (0, 1), "max"), ["sum", "max"]),
    "source": (
        lambda t: t.broadcast(ones(), (0, 1), 0),
        lambda t: t.broadcast(ones(), (0, 1), 1),
        ["from rank 0", "from rank 1"],
    ),
    "label": (
        lambda t: t.all_reduce(ones(), (0, 1), label="reduce bucket 1"),
        lambda t: t.all_reduce(ones(), (0, 1), label="clip (step 0)"),
        ["'reduce bucket 1'", "'clip (step 0)'"],
    ),
    "message": (lambda t: t.send(ones(3), 1), lambda t: t.recv(ones(5), 0), ["send(f32[3]", "recv(f32[5]"]),
    "message order": (
        lambda t: (t.send(ones(), 1, tag=0, wait=False), t.send(ones(), 1, tag=1)),
        lambda t: (t.recv(ones(), 0, tag=1, wait=False), t.recv(ones(), 0, tag=0)),
        ["tag 0", "tag 1"],
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatch_is_raised_on_every_member_and_names_who_did_what(case):
    *calls, texts = MISMATCHES[case]
    raised = {}

    def fn(transport):
        try:
            calls[transport.rank](transport)
        except CollectiveMismatch as error:
            raised[transport.rank] = str(error)
            time.sleep(0.05)
            raise

    error = failure(2, fn)
    assert isinstance(error.__cause__, CollectiveMismatch)
    assert set(raised) == {0, 1}
    for message in raised.values():
        assert all(text in message for text in texts), message


def test_labels_of_one_kind_may_differ():
    run_ranks(2, lambda t: t.all_reduce(ones(), (0, 1), label=f"reduce bucket {t.rank}"))


def test_an_input_written_in_flight_is_an_error():
    def fn(transport):
        tensor = ones()
        work = transport.all_reduce(tensor, (0, 1), wait=False, label="reduce x")
        if transport.rank == 1:
            tensor.add_(1)
        work.wait()

    error = failure(2, fn)
    assert "rank 1 wrote to the input of all_reduce(f32[3], sum) for 'reduce x'" in str(error)


# -- failure -----------------------------------------------------------------------------------------------------------


def test_the_first_failure_is_raised_with_its_rank_and_label_and_releases_the_rest():
    seen = {}

    def fn(transport):
        try:
            transport.all_reduce(ones(), everyone(transport), label="reduce bucket 0")
            transport.describe("forward layers.1")
            if transport.rank == 5:
                raise ValueError("boom")
            transport.all_reduce(ones(), everyone(transport), label="reduce bucket 1")
        except Exception as error:
            seen[transport.rank] = error
            raise

    error = failure(16, fn)
    assert (error.rank, error.label) == (5, "forward layers.1")
    assert isinstance(error.__cause__, ValueError)
    assert "rank 5 failed in 'forward layers.1': ValueError: boom" in str(error)
    others = [seen[rank] for rank in range(16) if rank != 5]
    assert all(isinstance(other, PeerFailure) and "rank 5 failed" in str(other) for other in others)
    assert "(rank 3 stopped at all_reduce(f32[3], sum) for 'reduce bucket 1')" in str(seen[3])


def test_abort_releases_the_rest():
    def fn(transport):
        if transport.rank == 0:
            transport.abort("no space left")
            return
        transport.barrier()

    error = failure(3, fn)
    assert error.rank == 0
    assert "no space left" in str(error)


def test_a_rank_that_never_comes_is_reported_with_what_it_does():
    def fn(transport):
        if transport.rank == 1:
            transport.describe("forward layers.3")
            time.sleep(1.0)
        transport.all_reduce(ones(), everyone(transport), label="reduce bucket 0")

    error = failure(3, fn, timeout=0.3)
    assert isinstance(error.__cause__, WaitTimeout)
    message = str(error)
    assert "waited 0.3 s for all_reduce(f32[3], sum) for 'reduce bucket 0'" in message
    assert "rank 1 did not arrive: it is running, in 'forward layers.3'" in message
    assert "arrived: rank 0, 2" in message


def test_a_rank_that_computes_on_is_left_behind():
    def fn(transport):
        if transport.rank == 0:
            raise ValueError("boom")
        time.sleep(1.0)

    error = failure(2, fn, grace=0.1)
    assert "left behind: ranks [1]" in error.__notes__[0]


def test_a_deadlock_is_found_at_once_and_shows_every_rank():
    def fn(transport):
        other = 1 - transport.rank
        if transport.rank < 2:
            transport.send(ones(), other, label=f"send to {other}")

    error = failure(3, fn, timeout=None)
    assert isinstance(error.__cause__, Deadlock)
    message = str(error)
    assert "rank 0: it waits for rank 1 in send(f32[3], rank 0 to rank 1, tag 0) for 'send to 1'" in message
    assert "rank 2: it has ended" in message


def test_waiting_for_a_rank_that_has_ended_is_a_deadlock():
    error = failure(2, lambda t: t.barrier() if t.rank else None)
    assert "rank 1: it waits for rank 0 in barrier()" in str(error)
    assert "rank 0: it has ended" in str(error)


def test_ranks_must_prepare_the_same_groups():
    assert "prepare different groups" in str(failure(2, lambda t: t.prepare([(0, 1)] * t.rank)))


def test_groups_are_in_ascending_order():
    assert "ascending order, not (1, 0)" in str(failure(2, lambda t: t.prepare([(1, 0)])))


# -- misuse ------------------------------------------------------------------------------------------------------------

MISUSE = {
    "is not in the group": lambda t: t.all_reduce(ones(), (1, 2)),
    "unknown reduction 'mean'": lambda t: t.all_reduce(ones(), (0,), "mean"),
    "'avg' needs a floating-point": lambda t: t.all_reduce(ones(dtype=torch.int64), (0,), "avg"),
    "bool tensor cannot be reduced with 'sum'": lambda t: t.all_reduce(ones(dtype=torch.bool), (0,)),
    "'and' reduces bool tensors": lambda t: t.all_reduce(ones(), (0,), "and"),
    "not contiguous": lambda t: t.all_reduce(torch.ones(2, 3).T, (0,)),
    "3 elements": lambda t: t.all_gather(ones(4), ones(3), (0,)),
    "output must be contiguous, of dtype": lambda t: t.all_gather(ones(3, torch.float64), ones(3), (0,)),
    "rank 1 is not in the group": lambda t: t.broadcast(ones(), (0,), 1),
    "the other end must be another rank": lambda t: t.send(ones(), 0),
}


@pytest.mark.parametrize("message", MISUSE)
def test_misuse_is_refused_even_in_a_world_of_one(message):
    with pytest.raises(TransportError, match=message):
        MISUSE[message](LocalTransport())


def test_a_world_of_one_copies():
    transport = LocalTransport()
    out = torch.zeros(3)
    transport.all_gather(out, ones(), (0,)).wait()
    assert out.tolist() == [1, 1, 1]
    transport.reduce_scatter(out, ones() * 2, (0,), wait=False).wait()
    assert out.tolist() == [2, 2, 2]
    assert transport.gather_objects({"a": 1}) == [{"a": 1}]
    assert transport.counters.total.calls == 0
