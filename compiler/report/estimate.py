"""What `planc estimate` prints."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from compiler.analysis.estimate import Estimate
from compiler.analysis.memory import Memory, Peak
from compiler.analysis.traffic import Traffic
from compiler.dsl.units import show_size
from compiler.ir.graph import Node
from compiler.report.numbers import duration


def print_estimate(console: Console, found: Estimate) -> None:
    """Memory, traffic and time, for people."""
    stages = len(found.memory)
    console.print(memory_table(found.fullest, found.machine.device.memory, stages))
    for line in memory_lines(found):
        console.print(line)
    busiest = max(found.traffic, key=lambda traffic: traffic.sent)
    console.print()
    if busiest.flows:
        console.print(traffic_table(busiest, stages))
    else:
        console.print("no communication")
    console.print()
    for line in time_lines(found):
        console.print(line)


def memory_table(memory: Memory, available: int, stages: int) -> Table:
    """The peak by category."""
    where = f" (stage {memory.stage})" if stages > 1 else ""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"memory of a rank{where}")
    table.add_column("at the peak", justify="right")
    table.add_column("between steps", justify="right")
    for category, size in memory.peak.categories.items():
        resting = memory.resting.get(category, 0)
        table.add_row(category, show_size(size), show_size(resting) if resting else "")
    color = "green" if memory.peak.bytes <= available else "red"
    table.add_row("all", f"[{color}]{show_size(memory.peak.bytes)}[/{color}]", show_size(sum(memory.resting.values())))
    return table


def memory_lines(found: Estimate) -> list[str]:
    """Where the peak is, and whether it fits."""
    memory, device = found.fullest, found.machine.device
    share = memory.peak.bytes / device.memory
    fits = "fits" if found.fits else "does not fit"
    lines = [
        f"peak in `{memory.peak.instruction}`{place(memory.peak)}",
        f"{fits} {device.name}: {100 * share:.3g} % of {show_size(device.memory)}",
    ]
    if memory.host:
        lines.append(f"and {show_size(memory.host)} in the memory of its host")
    if len(found.memory) > 1:
        each = ", ".join(show_size(m.peak.bytes) for m in found.memory)
        lines.append(f"peaks of the stages: {each}")
    return lines


def place(peak: Peak) -> str:
    return f": {origin_text(peak.node)}" if peak.node is not None else ""


def origin_text(node: Node) -> str:
    """`layers.*.mlp.w2 llama.py:60`, with the operator in front."""
    return " ".join(filter(None, (node.op.removesuffix(".default"), node.origin.module, node.origin.source)))


def traffic_table(traffic: Traffic, stages: int) -> Table:
    """Bytes sent by axes, kind and purpose."""
    where = f" of stage {traffic.stage}" if stages > 1 else ""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in (("over", "left"), ("collective", "left"), ("for", "left"), ("calls", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    table.add_column(f"sent by a rank{where}", justify="right")
    for (axes, kind, purpose), (calls, sent) in grouped(traffic).items():
        table.add_row(", ".join(axes), kind, purpose, str(calls), show_size(sent))
    table.add_row("all", "", "", str(sum(flow.calls for flow in traffic.flows)), show_size(traffic.sent))
    return table


def grouped(traffic: Traffic) -> dict[tuple[tuple[str, ...], str, str], tuple[int, int]]:
    """(axes, kind, purpose) → calls and bytes sent, the largest first."""
    calls: Counter = Counter()  # type: ignore[type-arg]
    sent: Counter = Counter()  # type: ignore[type-arg]
    for flow in traffic.flows:
        key = (flow.axes, flow.kind, flow.purpose)
        calls[key] += flow.calls
        sent[key] += flow.sent
    return {key: (calls[key], size) for key, size in sent.most_common()}


def time_lines(found: Estimate) -> list[str]:
    """The step and what it consists of."""
    time = found.time
    slowest = max(time.stages, key=lambda stage: stage.seconds - stage.waiting)
    longest = sorted(slowest.exposed.items(), key=lambda item: -item[1])
    exposed = ", ".join(f"{duration(seconds)} over {','.join(axes)}" for axes, seconds in longest)
    parts = [f"{duration(slowest.compute)} of computation"]
    parts += [f"exposed communication {exposed}"] if exposed else []
    parts += [f"bubble {100 * time.bubble:.3g} %"] if len(time.stages) > 1 else []
    what, count = ("tokens", found.tokens) if found.tokens else ("rows", found.rows)
    return [
        f"step on {found.ranks} x {found.machine.device.name}, at least {duration(time.seconds)}: {', '.join(parts)}",
        f"MFU {100 * found.mfu:.3g} % of {time.dtype}'s peak, {count / time.seconds:,.0f} {what}/s",
    ]


def estimate_json(found: Estimate) -> dict[str, Any]:
    """The same for machines; bytes, seconds, and shares of 1."""
    return {
        "device": found.machine.device.name,
        "device_memory": found.machine.device.memory,
        "ranks": found.ranks,
        "fits": found.fits,
        "memory": [
            {
                "stage": memory.stage,
                "peak": memory.peak.bytes,
                "categories": dict(memory.peak.categories),
                "between_steps": dict(memory.resting),
                "host": memory.host,
                "instruction": str(memory.peak.instruction),
                "instruction_number": memory.peak.number,
                "place": origin_text(memory.peak.node) if memory.peak.node is not None else None,
            }
            for memory in found.memory
        ],
        "traffic": [
            {
                "stage": traffic.stage,
                "sent": traffic.sent,
                "flows": [
                    {"axes": list(axes), "kind": kind, "purpose": purpose, "calls": calls, "sent": sent}
                    for (axes, kind, purpose), (calls, sent) in grouped(traffic).items()
                ],
            }
            for traffic in found.traffic
        ],
        "step_seconds": found.time.seconds,
        "bubble": found.time.bubble,
        "mfu": found.mfu,
        "tokens_per_second": found.tokens / found.time.seconds if found.tokens else None,
        "rows_per_second": found.rows / found.time.seconds,
        "model_flops": found.time.model_flops,
        "stages": [
            {
                "stage": stage.stage,
                "seconds": stage.seconds,
                "compute": stage.compute,
                "exposed": {",".join(axes): seconds for axes, seconds in stage.exposed.items()},
                "waiting": stage.waiting,
                "flops": dict(stage.flops),
            }
            for stage in found.time.stages
        ],
    }
