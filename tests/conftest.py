"""What all tests share: one thread, fixed seeds, a default dtype that does not leak, and `--full` for wide sweeps."""
import os
import random
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads, and for the processes that tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the sweeps over every model, mesh and micro-batch count")


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether `--full` was given, for sweeps inside a test."""
    return request.config.getoption("--full")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: part of a wide sweep, run only with --full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked `full` (as marks of parameters mostly), unless `--full` asks for them."""
    if config.getoption("--full"):
        return
    wide = [item for item in items if item.get_closest_marker("full")]
    if wide:
        config.hook.pytest_deselected(items=wide)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(autouse=True)
def clean_torch_state():
    """Each test starts from the same seeds, and whatever it sets globally ends with it."""
    random.seed(0)
    torch.manual_seed(0)
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)


@pytest.fixture
def float64() -> None:
    """Models and batches in double precision, where a plan must agree with one device to 1e-10."""
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def build_dir(tmp_path: Path) -> Path:
    """An empty folder for compiled programs."""
    folder = tmp_path / "build"
    folder.mkdir()
    return folder
