"""The simulator: all ranks of a program in one process, a thread each, on the same program and instruction streams.

For debugging a parallel program with a breakpoint and no cluster, and for `planc verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from runtime.executor import load_kinds
from runtime.initial import initial_state
from runtime.program import Program
from runtime.session import Session
from runtime.transport import Transport, run_ranks

Result = TypeVar("Result")


def simulate(
    program: Program,
    body: Callable[[Session], Result],
    state: Mapping[str, Tensor] | None = None,
    timeout: float = 60.0,
) -> list[Result]:
    """Run `body` on a session of every rank; the results by rank.

    `state` are full initial tensors by logical name. `timeout` bounds every wait of a rank for others, in seconds.
    Raises what the first failing rank raised, naming the rank; never hangs.
    """
    full = state if state is not None else initial_state(program, int(program.train["seed"]))
    kinds = load_kinds(program)

    def rank(transport: Transport) -> Result:
        with Session(program, transport, full, kinds) as session:
            return body(session)

    return run_ranks(program.world, rank, timeout=timeout)
