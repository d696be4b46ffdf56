"""Tensor parallelism and the wires: it communicates in every layer, so its ranks belong on the fast links of one node.

Ranks are row-major on the mesh: the last axis is the innermost, its ranks are neighbours, and a node holds as many
neighbours as it has devices.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from compiler.analysis.cost import communicates
from compiler.analysis.machine import Machine, machine
from compiler.diagnostics import Diagnostic, declare_codes
from compiler.dsl.plan import Plan
from compiler.layout.placement import Mesh
from runtime.transport.calls import sent_bytes

if TYPE_CHECKING:
    from compiler.link import Linked

declare_codes({"W030": "tensor parallelism over the links between nodes"})


def across_nodes(plan: Plan, mesh: Mesh | None = None, linked: Linked | None = None) -> list[Diagnostic]:
    """A warning if ranks that divide single layers are on several nodes; with what that costs, if the plan is compiled
    (`linked`, on `mesh`)."""
    strategy, cluster = plan.tensor, plan.cluster
    if strategy is None or cluster is None or cluster.nodes == 1:
        return []
    described = machine(plan, mesh or Mesh(tuple((axis.name, axis.size) for axis in plan.mesh)))
    axes = tensor_axes(plan, described.mesh)
    if not axes or described.link(axes) is described.intra:
        return []
    slower = described.intra.bandwidth / described.inter.bandwidth
    speeds = f"{described.inter.bandwidth / 1e9:g} GB/s each between nodes, {described.intra.bandwidth / 1e9:g} GB/s inside"
    notes = [f"a node has {described.devices} devices: {speeds} ({slower:.3g} times as fast)"]
    if linked is not None:
        notes.append(_cost(described, linked, axes, plan.microbatches))
    return [
        Diagnostic(
            "warning",
            "W030",
            f"`tensor over {', '.join(strategy.axes)}` communicates between nodes, in every layer",
            strategy.axes_span,
            notes=tuple(notes),
            help=(_advice(plan, described),),
        )
    ]


def tensor_axes(plan: Plan, mesh: Mesh) -> tuple[str, ...]:
    """The axes of more than one rank that the statement goes over, in the order of the mesh."""
    strategy = plan.tensor
    return mesh.parts(*strategy.axes) if strategy is not None else ()


def _cost(described: Machine, linked: Linked, axes: tuple[str, ...], microbatches: int) -> str:
    """What a rank sends over these axes in one step, and how long that takes on either link at least."""
    each = {name: _bytes([*k.code.forward, *k.code.backward], described, axes) for name, k in linked.kinds.items()}
    total = sum(each[call.kind] for call in linked.program.calls) * microbatches
    slow, fast = (total / link.bandwidth for link in (described.inter, described.intra))
    return f"a rank sends {total / 1e6:.3g} MB in a step: {slow * 1e3:.3g} ms, {fast * 1e3:.3g} ms inside a node"


def _bytes(nodes: list, described: Machine, axes: tuple[str, ...]) -> int:
    total = 0
    for node in nodes:
        found = communicates(node)
        if found is not None:
            kind, over, full = found
            total += sent_bytes(kind, described.ranks(over), full) if set(over) & set(axes) else 0
    return total


def _advice(plan: Plan, described: Machine) -> str:
    axes = plan.tensor.axes if plan.tensor is not None else ()
    size = math.prod(plan.axis_size(axis) for axis in axes)
    if described.devices % size == 0:
        order = [axis for axis in plan.mesh if axis.name not in axes]
        order += [axis for axis in plan.mesh if axis.name in axes]
        return f"neighbouring ranks come last: mesh {' '.join(f'{axis.name}={axis.size}' for axis in order)}"
    fits = max(n for n in range(1, described.devices + 1) if described.devices % n == 0 and n <= size)
    return f"at most {fits} ranks of it fit in a node; more ranks of `data` or `pipeline` bear slow links better"
