"""python -m runtime FOLDER: train a compiled program.

As a rank of `torchrun --nproc-per-node N -m runtime FOLDER`, or started plainly: then it starts the local processes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status of `train`, 2 for a mistake in the command, or 130 for Ctrl-C."""
    if "RANK" in os.environ:
        # Until the run can stop in order (`runtime.interrupt`): an exception may be lost in what is being imported.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("planc: interrupted", file=sys.stderr)
        return 130


def run(given: Sequence[str]) -> int:
    options = parser().parse_args(given)
    # Imported here: torch takes its time, and Ctrl-C must find something that answers it meanwhile.
    from runtime.failing import leave
    from runtime.log import to_line
    from runtime.program import ProgramError, load
    from runtime.train import TrainError, check_run
    from runtime.transport.launch import launch, under_torchrun

    if under_torchrun():
        return leave(started(options))
    try:
        program = load(options.folder)
        check_run(program, options.trace)
    except (ProgramError, TrainError) as error:
        print(
            to_line(error=str(error)) if options.json else f"planc: {error}",
            file=sys.stdout if options.json else sys.stderr,
        )
        return 1
    if options.processes not in (None, program.world):
        mesh = " ".join(f"{axis}={size}" for axis, size in program.axes.items())
        print(
            f"planc: {program.name} was compiled for {program.world} ranks ({mesh or 'no mesh'}), not "
            f"{options.processes}; compile it with another mesh: --set AXIS=N",
            file=sys.stderr,
        )
        return 2
    if program.world == 1 and not options.json:  # for machines, the launcher tells of a failure
        return started(options)
    return launch(program.world, ["-m", "runtime", *given], json=options.json)


def started(options: argparse.Namespace) -> int:
    from runtime.train import train

    return train(
        options.folder,
        options.resume,
        weights=options.weights,
        plan=options.plan,
        trace=options.trace,
        json=options.json,
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runtime", description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="a program folder, from planc compile")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the run")
    parser.add_argument("--processes", type=int, metavar="N", help="the number of local processes, for a check")
    parser.add_argument("--weights", metavar="PATH", help="begin with the weights of a safetensors file or folder")
    parser.add_argument("--plan", metavar="PLAN", help="the plan's path and its --set options, for the hints at the end")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace of three steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
