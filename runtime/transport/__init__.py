"""Communication between ranks: torch.distributed (NCCL, gloo), threads of one process, or a world of one."""

from runtime.transport.base import Finished, Group, Transport, Work
from runtime.transport.calls import Call, Count, Counters
from runtime.transport.connect import connect
from runtime.transport.errors import (
    CollectiveMismatch,
    ConnectionLost,
    Deadlock,
    PeerFailure,
    RankFailure,
    TransportError,
    WaitTimeout,
)
from runtime.transport.in_process import InProcessTransport, run_ranks
from runtime.transport.local import LocalTransport
from runtime.transport.together import together
from runtime.transport.world import World

__all__ = [
    "Call",
    "CollectiveMismatch",
    "ConnectionLost",
    "Count",
    "Counters",
    "Deadlock",
    "Finished",
    "Group",
    "InProcessTransport",
    "LocalTransport",
    "PeerFailure",
    "RankFailure",
    "Transport",
    "TransportError",
    "WaitTimeout",
    "Work",
    "World",
    "connect",
    "run_ranks",
    "together",
]
