"""Ranks as processes over gloo: the same results as in one process, and failures that name their cause."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from runtime.transport import run_ranks
from runtime.transport.launch import launch
from tests.runtime.exercise import exercise

WORKER = ["-m", "tests.runtime.gloo_worker"]


def test_gloo_returns_what_the_in_process_transport_does(tmp_path):
    assert launch(3, [*WORKER, "exercise", str(tmp_path)]) == 0

    def expected(transport):
        results = exercise(transport)
        return [results, transport.counters.total.calls, transport.counters.total.bytes]

    for rank, wanted in enumerate(run_ranks(3, expected)):
        got = json.loads((tmp_path / f"{rank}.json").read_text())
        assert got[1:] == wanted[1:]
        assert got[0] == wanted[0]


def test_the_first_failure_is_named_by_every_rank_and_the_launcher(tmp_path, capfd):
    started = time.monotonic()
    assert launch(3, [*WORKER, "fails", str(tmp_path)]) == 1
    assert time.monotonic() - started < 20
    first = "rank 1 failed in 'forward layers.1 (step 3)': ValueError: an injected error"
    assert first in (tmp_path / "0.txt").read_text()
    assert "stopped at all_reduce(f32[4], sum) for 'reduce bucket 0 (step 3)'" in (tmp_path / "2.txt").read_text()
    shown = capfd.readouterr().err
    assert f"planc: {first}" in shown
    assert "[rank 1]" in shown


def test_a_late_rank_is_named_with_what_it_does(tmp_path):
    assert launch(2, [*WORKER, "late", str(tmp_path)]) == 1
    message = (tmp_path / "0.txt").read_text()
    assert message.startswith("WaitTimeout: rank 0 waited 1 s for all_reduce(f32[4], sum)")
    assert "rank 1: in 'a long forward'" in message


def test_ranks_must_prepare_the_same_groups(tmp_path):
    assert launch(2, [*WORKER, "differ", str(tmp_path)]) == 1
    assert "prepare different groups" in (tmp_path / "0.txt").read_text()


# -- the launcher, with processes that need no torch -------------------------------------------------------------------


def test_the_environment_is_torchruns_and_only_rank_0_prints(capfd):
    code = (
        "import os; e = os.environ;"
        "print('out', *(e[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'OMP_NUM_THREADS')));"
        "import sys; print('err', e['RANK'], e['EXTRA'], file=sys.stderr)"
    )
    assert launch(2, ["-c", code], env={"EXTRA": "yes", "OMP_NUM_THREADS": "3"}) == 0
    time.sleep(0.1)
    out, err = capfd.readouterr()
    assert out == "out 0 0 2 2 3\n"
    assert "[rank 1] err 1 yes\n" in err
    assert "err 0 yes\n" in err


@pytest.mark.parametrize(("action", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_one_failure_ends_all_ranks(action, status):
    code = f"import os, sys, time; {action} if os.environ['RANK'] == '1' else time.sleep(60)"
    started = time.monotonic()
    assert launch(2, ["-c", code]) == status
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_stop_the_ranks(tmp_path, number, status):
    code = (
        "import os, pathlib, time;"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(str(os.getpid())); time.sleep(60)"
    )
    program = f"import sys; from runtime.transport.launch import launch; sys.exit(launch(2, ['-c', {code!r}]))"
    launcher = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    end = time.monotonic() + 30
    files = [tmp_path / "0", tmp_path / "1"]
    while time.monotonic() < end and not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.05)
    launcher.send_signal(number)
    assert launcher.wait(20) == status
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
