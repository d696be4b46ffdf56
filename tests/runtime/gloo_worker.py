"""What the processes of test_torch_distributed run: `python -m tests.runtime.gloo_worker MODE FOLDER`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from runtime.transport.torch_distributed import TorchTransport
from tests.runtime.exercise import exercise


def main(mode: str, folder: Path) -> None:
    transport = TorchTransport.from_env("gloo", timeout=1.0 if mode == "late" else 30.0)
    everyone = tuple(range(transport.size))
    try:
        if mode == "exercise":
            results = exercise(transport)
            total = transport.counters.total
            (folder / f"{transport.rank}.json").write_text(json.dumps([results, total.calls, total.bytes]))
        elif mode == "fails":
            transport.prepare([everyone])
            transport.describe("forward layers.1 (step 3)")
            if transport.rank == 1:
                raise ValueError("an injected error")
            transport.all_reduce(torch.ones(4), everyone, label="reduce bucket 0 (step 3)")
        elif mode == "late":
            transport.prepare([everyone])
            if transport.rank == 1:
                transport.describe("a long forward")
                time.sleep(4)
            transport.all_reduce(torch.ones(4), everyone, label="reduce bucket 0 (step 3)")
        elif mode == "differ":
            transport.prepare([everyone] if transport.rank else [])
    except Exception as error:
        (folder / f"{transport.rank}.txt").write_text(f"{type(error).__name__}: {error}")
        transport.abort(f"{type(error).__name__}: {error}")
        raise
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
