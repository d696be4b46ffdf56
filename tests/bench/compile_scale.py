"""Compile time and memory at scale: Llama-3-70B's shape on 1,024 ranks, and how the time grows with depth.

    python -m tests.bench.compile_scale [--layers 8 80]

Each depth is compiled in a process of its own; prints the seconds of each stage and the peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

PLAN = "dsl_examples/llama3_70b.plan"


def measure(layers: int) -> dict[str, float]:
    """Compile in this process; seconds by stage and peak memory in MB."""
    from compiler.driver import compile

    compilation = compile(PLAN, [f"layers={layers}"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**compilation.seconds, "peak_mb": peak, "distinct": float(len(compilation.linked.kinds))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[8, 80])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one)))
        return
    rows = {}
    for layers in options.layers:
        command = [sys.executable, "-m", "tests.bench.compile_scale", "--one", str(layers)]
        rows[layers] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        stages = "  ".join(f"{name} {rows[layers][name]:.1f}s" for name in ("capture", "lower", "layouts", "segments"))
        total = sum(rows[layers][name] for name in ("capture", "lower", "layouts", "segments"))
        print(f"{layers:4d} layers: {stages}  total {total:.1f} s  peak {rows[layers]['peak_mb']:.0f} MB")
    if len(rows) > 1:
        first, last = rows[options.layers[0]], rows[options.layers[-1]]
        rest = [sum(row[name] for name in ("lower", "layouts", "segments")) for row in (first, last)]
        print(f"without capture: {options.layers[-1]} layers cost {rest[1] / rest[0]:.2f}x what {options.layers[0]} cost")


if __name__ == "__main__":
    main()
