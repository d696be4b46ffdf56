"""Tensor parallelism: the whole zoo at 2, 3, 4 and 8 ranks, with and without sequence parallelism, times data parallelism."""

from __future__ import annotations

import pytest

from tests.sweeps.grid import MODELS, check, strategy
from tests.test_tensor import STYLES
from tests.zoo import get


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_found_styles(name: str, ranks: int, sequence: bool, data: int) -> None:
    styles = strategy("tensor over tp", style="auto", sequence="on" if sequence else "off")
    check(get(name), f"dp={data} tp={ranks}", styles, batch=4)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", STYLES)
def test_given_styles(name: str, ranks: int, sequence: bool, data: int) -> None:
    styles = f"tensor over tp {{ {STYLES[name]}\n style = manual\n sequence = {'on' if sequence else 'off'} }}"
    check(get(name), f"dp={data} tp={ranks}", styles, batch=4)
