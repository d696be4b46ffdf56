"""The machines that a plan is for: how long a device computes and moves bytes, and how long communication takes.

A device is a roofline (Williams et al. 2009, https://doi.org/10.1145/1498765.1498785): an operator takes as long as its
arithmetic at peak speed, or as its bytes at the memory's bandwidth, whichever is longer. A link is α-β: seconds for each
step of the algorithm, and bytes at the link's bandwidth. So times are lower bounds, and right in proportion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from compiler.dsl.devices import Device
from compiler.dsl.plan import ClusterSpec, Plan
from compiler.dsl.strings import Link
from compiler.layout.placement import Mesh
from runtime.mesh import TIME
from runtime.transport.calls import sent_bytes

INTRA = Link("PCIe 5", 64e9, 5e-6)
INTER = Link("InfiniBand NDR", 50e9, 10e-6)
"""The links of a cluster that names none; latencies are also those of links that are named without."""


@dataclass(frozen=True)
class Machine:
    """Devices on a mesh of ranks, `devices` of them in each node; links are given as bandwidth per device."""

    device: Device
    mesh: Mesh
    devices: int
    intra: Link = INTRA
    inter: Link = INTER

    def peak(self, dtype: str) -> float:
        """Floating-point operations a second."""
        return self.device.flops.get(dtype, self.device.flops["float32"])

    def seconds(self, flops: int, moved: int, dtype: str) -> float:
        """Of one operator that moves so many bytes from and to the device's memory."""
        return max(flops / self.peak(dtype), moved / self.device.bandwidth)

    def link(self, axes: tuple[str, ...]) -> Link:
        """The slowest link in a group over these axes: between nodes unless every group lies in one node."""
        over = [name for name in self.mesh.names if name != TIME]
        first = min((over.index(axis) for axis in axes), default=len(over))
        block = math.prod(self.mesh.size(axis) for axis in over[first:])  # neighbouring ranks that hold a whole group
        return self.intra if self.devices % block == 0 else self.inter

    def ranks(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.size(axis) for axis in axes)

    def communication(self, kind: str, axes: tuple[str, ...], full: int) -> float:
        """Seconds of a collective ("all_reduce", "all_gather", …) over `axes` on `full` bytes of the whole value, or of a
        message ("send")."""
        n, link = self.ranks(axes), self.link(axes)
        return STEPS[kind](n) * (link.latency or 0.0) + sent_bytes(kind, n, full) / link.bandwidth


STEPS = {
    "all_reduce": lambda n: 2 * math.ceil(math.log2(n)),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "send": lambda n: 1,
}
"""One after the other: a tree for an all-reduce, rings for the others."""


def machine(plan: Plan, mesh: Mesh) -> Machine:
    """The cluster that a plan describes, or one node of CPUs."""
    cluster = plan.cluster or ClusterSpec()
    devices = cluster.devices or -(-plan.ranks // cluster.nodes)
    intra, inter = (
        given if given is not None and given.latency is not None else replace(given or usual, latency=usual.latency)
        for given, usual in ((cluster.intra, INTRA), (cluster.inter, INTER))
    )
    return Machine(cluster.hardware, mesh, devices, intra, inter)
