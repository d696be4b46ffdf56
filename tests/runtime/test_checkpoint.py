"""Checkpoints: what one mesh saved another loads; complete or not there; messages; weights as safetensors."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import runtime
from runtime.checkpoint import (
    CheckpointError,
    InitialWeights,
    SafetensorsFiles,
    checkpoints,
    export_safetensors,
    latest,
    prune,
    read_state,
    storage,
    step_path,
)
from runtime.checkpoint.fit import Form
from runtime.checkpoint.pieces import boxes, pieces
from runtime.checkpoint.weights import SafetensorsWriter
from runtime.cuts import Cut, local_part
from runtime.session import Session
from runtime.simulate import simulate
from runtime.transport import LocalTransport, RankFailure
from tests.runtime.handmade import Net, batch, write_bigram, write_program

STEPS = 6


def session(folder: Path, **options) -> Session:
    """A world of one on a fresh program."""
    return Session(write_program(folder, **options), LocalTransport())


def run(program, first: int, last: int, restore: Path | None = None, save: Path | None = None):
    """Losses of steps [first, last) and the state after them, of each rank."""

    def body(s: Session):
        data = s.restore(restore) if restore else None
        losses = [s.step(batch(step)).loss for step in range(first, last)]
        if save:
            s.save(save, {"position": last})
        return losses, s.state_dict(), data

    return simulate(program, body)


# -- pieces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_pieces_of_all_ranks_tile_the_tensor(seed):
    """Each element is in just one rank's pieces, padding in none, and every piece is where its offsets say."""
    rng = random.Random(seed)
    sizes = {"a": rng.randint(1, 4), "b": rng.randint(1, 3), "c": rng.randint(1, 2)}
    axes, cuts, shape = list(sizes), [], []
    rng.shuffle(axes)
    for dim in range(rng.randint(1, 3)):
        outer, count, unit = rng.randint(1, 3), rng.randint(1, 7), rng.randint(1, 3)
        own = tuple(axes.pop() for _ in range(rng.randint(0, len(axes))))
        order = rng.choice(["", "", "zigzag", "2+1", "3+1+2"])
        if own and "+" in order:  # pieces divide evenly
            count *= sum(map(int, order.split("+"))) * math.prod(sizes[axis] for axis in own)
        if own:
            cuts.append(Cut(dim, own, outer, count, unit, order))
        shape.append(outer * count * unit)
    whole = torch.arange(math.prod(shape)).view(shape)
    times = torch.zeros_like(whole)
    for values in itertools.product(*map(range, sizes.values())):
        coords = dict(zip(sizes, values, strict=True))
        if any(coords[axis] for axis in axes):
            continue  # a replica
        local = local_part(whole, cuts, sizes, coords)
        flat = local.reshape(-1)
        border = rng.randint(0, flat.numel())  # where ZeRO cuts it
        held = [*boxes(flat[:border], 0, local.shape), *boxes(flat[border:], border, local.shape)]
        for piece in pieces(held, shape, cuts, sizes, coords):
            index = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
            assert torch.equal(piece.tensor, whole[index])
            times[index] += 1
    assert torch.equal(times, torch.ones_like(times))


# -- from mesh to mesh -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "meshes",
    [[(4, 1), (2, 1), (1, 1)], [(1, 1), (4, 1), (3, 1)], [(1, 2), (1, 3), (2, 1)], [(2, 3), (1, 4), (1, 1)]],
    ids=lambda meshes: "-".join(f"dp{dp}tp{tp}" for dp, tp in meshes),
)
def test_one_mesh_saves_and_another_goes_on(tmp_path, meshes):
    """Two steps on each mesh give the losses and the state of six steps on one device."""
    truth = run(write_program(tmp_path / "one"), 0, STEPS)[0]
    path = None
    for turn, (dp, tp) in enumerate(meshes):
        program = write_program(tmp_path / f"p{turn}", dp, tp)
        save = step_path(tmp_path / "run", 2 * turn + 2)
        results = run(program, 2 * turn, 2 * turn + 2, path, save)
        for losses, _, data in results:
            assert losses == pytest.approx(truth[0][2 * turn : 2 * turn + 2], rel=1e-13)
            assert data == (None if path is None else {"position": 2 * turn})
        path = save
    for _, state, _ in results:
        for name, tensor in truth[1].items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-12)


def test_the_same_mesh_goes_on_to_the_bit(tmp_path):
    program = write_program(tmp_path / "p", 2, 2)
    whole = run(program, 0, STEPS)
    run(program, 0, 3, save=tmp_path / "step-3")
    rest = run(program, 3, STEPS, restore=tmp_path / "step-3")
    for (losses, state, _), (later, state_after, _) in zip(whole, rest, strict=True):
        assert later == losses[3:]
        assert all(torch.equal(state[name], state_after[name]) for name in state)


def test_replicas_share_the_writing(tmp_path):
    """Each tensor is written once, and each of four replicas writes some."""
    run(write_program(tmp_path / "p", 4), 0, 1, save=tmp_path / "step-1")
    metadata = storage.index_of(tmp_path / "step-1")
    assert all(len(entry.chunks) == 1 for entry in metadata.state_dict_metadata.values())
    assert len({place.relative_path for place in metadata.storage_data.values()}) == 4


def test_what_a_checkpoint_holds(tmp_path):
    run(write_program(tmp_path / "p", 1, 2), 0, 1, save=tmp_path / "step-1")
    stored = storage.stored_tensors(storage.index_of(tmp_path / "step-1"))
    trained = ["w2", "b1", "w1"]
    assert set(stored) == {
        *(f"model.{name}" for name in [*trained, "frozen"]),
        *(f"optimizer.{state}.{name}" for state in ("exp_avg", "exp_avg_sq") for name in trained),
        "buffer.scale",
        "buffer.table",
    }
    assert stored["optimizer.exp_avg.w2"].shape == stored["model.w2"].shape == (3, 5)
    state = read_state(tmp_path / "step-1")
    assert (state.step, state.optimizer_step, state.seed, state.name) == (1, 1, 3, "handmade")
    assert state.plan == "# written by hand\n" and state.data == {"position": 1} and state.mesh == {"dp": 1, "tp": 2}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_dcp_reads_it(tmp_path):
    """torch.distributed.checkpoint's own loader, without any of ours."""
    _, whole, _ = run(write_program(tmp_path / "p", 1, 3), 0, 2, save=tmp_path / "step-2")[0]
    state = {"model.w1": torch.zeros(5, 4, dtype=torch.float64), "buffer.scale": torch.zeros((), dtype=torch.float64)}
    dcp.load(state, checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert torch.equal(state["model.w1"], whole["w1"])
    assert state["buffer.scale"] == 1


def test_another_dtype_is_rounded(tmp_path):
    _, whole, _ = run(write_program(tmp_path / "p"), 0, 2, save=tmp_path / "step-2")[0]
    narrow = session(tmp_path / "q", dtype="float32")
    narrow.restore(tmp_path / "step-2")
    assert torch.equal(narrow.parameters()["w1"], whole["w1"].float())


def test_state_dict(tmp_path):
    """By the model's own names, for eager PyTorch; and back."""
    for _, state, _ in run(write_program(tmp_path / "p", 2, 2), 0, 2):
        model = Net()
        model.load_state_dict(state)
        assert torch.equal(model.again.w2, state["w2"])
    other = session(tmp_path / "q")
    other.load_state_dict(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())
    del state["again.w2"]
    other.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"lacks b1; the program has no b2"):
        other.load_state_dict({**{n: t for n, t in state.items() if n != "b1"}, "b2": state["b1"]})


# -- complete or not there ---------------------------------------------------------------------------------------------


def test_a_failed_save_leaves_the_old_one(tmp_path, monkeypatch):
    program = write_program(tmp_path / "p", 3)
    run(program, 0, 1, save=step_path(tmp_path, 1))
    write = storage.write

    def full(folder, tensors, rank):
        if rank == 1:
            raise OSError("no space left on device")
        write(folder, tensors, rank)

    monkeypatch.setattr(storage, "write", full)

    def body(s: Session) -> str:
        with pytest.raises(CheckpointError) as error:
            s.save(step_path(tmp_path, 2))
        return str(error.value)

    assert set(simulate(program, body)) == {f"cannot write {tmp_path}/step-2 (rank 1): no space left on device"}
    assert latest(tmp_path) == step_path(tmp_path, 1)
    assert (tmp_path / ".step-2.tmp").exists()
    monkeypatch.undo()
    run(program, 0, 2, save=step_path(tmp_path, 2))
    assert latest(tmp_path) == step_path(tmp_path, 2)
    assert not (tmp_path / ".step-2.tmp").exists()


@pytest.mark.parametrize("moment", ["write", "join", "replace"])
def test_a_crash_leaves_the_old_one(tmp_path, monkeypatch, moment):
    one = session(tmp_path / "p")
    one.save(step_path(tmp_path, 0))
    one.step(batch(0))

    class Crash(BaseException):
        pass

    def crash(*arguments):
        raise Crash

    module = "folder" if moment == "replace" else "storage"
    monkeypatch.setattr(f"runtime.checkpoint.{module}.{moment}", crash)
    with pytest.raises(Crash):
        one.save(step_path(tmp_path, 1))
    assert latest(tmp_path) == step_path(tmp_path, 0)
    prune(tmp_path, keep=2)
    assert [path.name for path in tmp_path.iterdir() if "step" in path.name] == ["step-0"]


def test_saving_again_replaces(tmp_path):
    one = session(tmp_path / "p")
    one.save(tmp_path / "best")
    one.step(batch(0))
    one.save(tmp_path / "best")
    assert read_state(tmp_path / "best").step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "p"]


def test_keep(tmp_path):
    one = session(tmp_path / "p")
    for step in (2, 9, 10, 100):
        one.save(step_path(tmp_path, step))
    (tmp_path / "step-notes").mkdir()
    prune(tmp_path, keep=2)
    assert list(checkpoints(tmp_path)) == [100, 10]
    assert (tmp_path / "step-notes").exists()


def _truncate(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])


BREAKS = {
    "truncated": (_truncate, r"step-2 is damaged: its file __0_0.distcp has \d+ of \d+ bytes"),
    "no file": (lambda path: (path / "__0_0.distcp").unlink(), "its file __0_0.distcp is missing"),
    "no index": (lambda path: (path / ".metadata").unlink(), "no complete checkpoint: it has no .metadata"),
    "bad index": (lambda path: (path / ".metadata").write_bytes(b"\x80nonsense"), ".metadata is damaged"),
    "no state": (lambda path: (path / "run.json").unlink(), "no complete checkpoint: it has no run.json"),
    "bad state": (lambda path: (path / "run.json").write_text('{"version": 1'), "run.json is damaged"),
    "newer": (lambda path: (path / "run.json").write_text('{"version": 9}'), "has version 9; this runtime reads"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_ones_are_passed_over(tmp_path, name):
    breaks, message = BREAKS[name]
    one = session(tmp_path / "p")
    one.save(step_path(tmp_path, 1))
    one.save(step_path(tmp_path, 2))
    breaks(step_path(tmp_path, 2))
    notes: list[str] = []
    assert latest(tmp_path, notes.append) == step_path(tmp_path, 1)
    assert len(notes) == 1
    with pytest.raises(CheckpointError, match=message):
        one.restore(step_path(tmp_path, 2))


def test_damaged_contents(tmp_path):
    """A file of the right length with other bytes in it: some of it may be loaded already."""
    one = session(tmp_path / "p")
    one.save(tmp_path / "step-1")
    file = tmp_path / "step-1" / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match="restored in part only"):
        one.restore(tmp_path / "step-1")


def test_nothing_there(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="nowhere is no complete checkpoint"):
        session(tmp_path / "p").restore(tmp_path / "nowhere")


def test_another_program(tmp_path):
    session(tmp_path / "p").save(tmp_path / "step-0")
    other = Session(write_bigram(tmp_path / "q"), LocalTransport())
    with pytest.raises(CheckpointError) as error:
        other.restore(tmp_path / "step-0")
    assert "the checkpoint lacks model.table, optimizer.momentum_buffer.table" in str(error.value)
    assert "the program has no model.w1, model.b1, model.w2" in str(error.value).replace("model.frozen, ", "")


def test_another_shape_changes_nothing(tmp_path, monkeypatch):
    session(tmp_path / "p").save(tmp_path / "step-0")
    monkeypatch.setattr("tests.runtime.handmade.IN", 6)
    program = write_program(tmp_path / "q", 2)

    def body(s: Session) -> bool:
        before = s.state_dict()
        with pytest.raises(CheckpointError, match=r"model.w1 has shape \[5, 4\] in the checkpoint and \[5, 6\] in"):
            s.restore(tmp_path / "step-0")
        return all(torch.equal(tensor, before[name]) for name, tensor in s.state_dict().items())

    assert simulate(program, body) == [True, True]


# -- safetensors -------------------------------------------------------------------------------------------------------


def test_safetensors_round_trip(tmp_path):
    """From a cut session and from its checkpoint the same file; eager PyTorch and another mesh take it."""
    program = write_program(tmp_path / "p", 1, 3)

    def body(s: Session):
        s.step(batch(0))
        s.save(tmp_path / "step-1")
        export_safetensors(s, tmp_path / "a" / "model.safetensors")
        return s.state_dict()

    state = simulate(program, body)[0]
    export_safetensors(tmp_path / "step-1", tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a" / "model.safetensors").read_bytes()
    found = load_file(tmp_path / "b.safetensors")
    assert set(found) == {"w1", "b1", "w2", "again.w2", "frozen", "scale"}
    assert all(torch.equal(found[name], state[name]) for name in found)
    Net().load_state_dict(found)
    write_program(tmp_path / "q")
    with runtime.load(tmp_path / "q", LocalTransport(), weights=tmp_path / "a") as one:
        assert all(torch.equal(tensor, state[name]) for name, tensor in one.state_dict().items())
        assert one.state.buffers["table"].tolist() == [0, 1, 2]
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


def test_safetensors_of_hugging_face_layout(tmp_path):
    state = Net().state_dict()
    save_file({"w1": state["w1"], "b1": state["b1"]}, tmp_path / "one.safetensors")
    rest = {n: state[n].clone() for n in ("again.w2", "frozen", "scale")}  # w2 by its other name only
    save_file(rest, tmp_path / "two.safetensors")
    places = {"w1": "one.safetensors", "b1": "one.safetensors"} | dict.fromkeys(rest, "two.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    weights = InitialWeights(write_program(tmp_path / "p"), tmp_path)
    assert torch.equal(weights["w2"], state["w2"])
    assert set(weights) == {"w1", "b1", "w2", "frozen", "scale", "table"}


def test_safetensors_messages(tmp_path):
    program = write_program(tmp_path / "p")
    save_file({"w1": torch.zeros(5, 5)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError) as error:
        InitialWeights(program, tmp_path / "x.safetensors")
    assert "x.safetensors does not fit handmade: the file lacks b1, w2, frozen, scale" in str(error.value)
    assert "w1 has shape [5, 5] in the file and [5, 4] in the program" in str(error.value)
    (tmp_path / "y.safetensors").write_text("no such format")
    with pytest.raises(CheckpointError, match=r"y.safetensors cannot be read as safetensors"):
        SafetensorsFiles(tmp_path / "y.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        SafetensorsFiles(tmp_path / "z.safetensors")
    with pytest.raises(CheckpointError, match="holds neither model.safetensors nor"):
        SafetensorsFiles(tmp_path / "p")


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def test_every_dtype_survives(tmp_path):
    tensors = {str(dtype): torch.arange(3).to(dtype) for dtype in DTYPES} | {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }
    forms = {name: Form(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    with SafetensorsWriter(tmp_path / "x", forms) as writer:
        for name in reversed(list(tensors)):
            writer.put(name, tensors[name])
    found = load_file(tmp_path / "x")
    assert all(found[n].dtype == t.dtype and torch.equal(found[n].float(), t.float()) for n, t in tensors.items())


def test_a_failing_export_tells_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    program = write_program(tmp_path / "p", 2)

    def body(s: Session) -> None:
        export_safetensors(s, tmp_path / "file" / "model.safetensors")

    with pytest.raises(RankFailure, match="cannot write"):
        simulate(program, body)
