"""A collective under way: what generated code holds between `ctx.start_…` and `ctx.wait`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from runtime.transport import Work


@dataclass(frozen=True)
class Pending:
    """`held` is what the transport reads, which must live until `work` is done; `finish` makes the result then."""

    work: Work
    held: Tensor
    finish: Callable[[], Tensor]

    def result(self) -> Tensor:
        """Wait (on CUDA: order the current stream behind the communication) and make the result.

        Raises what `Work.wait` raises, naming the call's label.
        """
        self.work.wait()
        return self.finish()
