"""Checkpoints of compiled models: dropout, tied and unused parameters, BatchNorm's statistics, frozen weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import compiler
from compiler.analysis.verify import random_batch
from compiler.dsl import load
from runtime.checkpoint import export_safetensors, latest, step_path
from runtime.log import read_log
from runtime.program import Program
from runtime.program import load as load_program
from runtime.simulate import simulate
from runtime.train import train
from runtime.transport import run_ranks
from tests.zoo import get, instantiate, plan_text

STEPS = 6


def program_of(name: str, folder: Path, dp: int, extra: str = "", microbatches: int = 1, widen: bool = True) -> Program:
    """The compiled program of a zoo model, in float64 if `widen`."""
    plan = folder / f"{name}-{dp}.plan"
    plan.write_text(plan_text(get(name), batch=12, mesh=f"dp={dp}", microbatches=microbatches, extra=extra))
    compilation = compiler.compile(load(str(plan)), options=compiler.Options(widen=widen))
    return load_program(compilation.write(folder / f"{name}-{dp}"))


@pytest.mark.parametrize("name", ["gpt-tiny", "mlp-tiny", "resnet-tiny", "lora-tiny"])
def test_saved_on_one_mesh_and_loaded_on_another(tmp_path, name):
    """Two steps each on dp = 4, 2 and 1 are six steps on one device."""

    def run(program: Program, first: int, last: int, restore: Path | None = None, save: Path | None = None):
        batches = [random_batch(program, step) for step in range(first, last)]

        def body(session):
            if restore:
                session.restore(restore)
            losses = [session.step(batch).loss for batch in batches]
            if save:
                session.save(save)
            return losses, session.state_dict() | session.state.buffers

        return simulate(program, body)

    truth = run(program_of(name, tmp_path, 1), 0, STEPS)[0]
    path = None
    for turn, dp in enumerate((4, 2, 1)):
        first, save = 2 * turn, step_path(tmp_path, 2 * turn + 2)
        results = run(program_of(name, tmp_path, dp), first, first + 2, path, save)
        for losses, _ in results:
            assert losses == pytest.approx(truth[0][first : first + 2], rel=1e-11)
        path = save
    for key, tensor in truth[1].items():
        torch.testing.assert_close(results[0][1][key], tensor, rtol=1e-9, atol=1e-9, msg=lambda m: f"{key}: {m}")


def test_trained_weights_load_into_the_model(tmp_path, monkeypatch):
    """A tied GPT: trained on two ranks, its weights go into eager PyTorch."""
    monkeypatch.chdir(tmp_path)
    train_block = 'train { data = "synthetic", steps = 12, save_every = 6 }'
    program = program_of("gpt-tied-tiny", tmp_path, 2, train_block, microbatches=2, widen=False)
    assert set(run_ranks(2, lambda transport: train(program.folder, transport=transport))) == {0}
    newest = latest(f"runs/{program.name}")
    assert newest is not None and newest.name == "step-12"
    export_safetensors(newest, "w.safetensors")
    entry = get("gpt-tied-tiny")
    model = instantiate(entry.factory, entry.options)
    assert not any(model.load_state_dict(load_file("w.safetensors")))
    assert len(read_log(f"runs/{program.name}/log.jsonl")) == 12
