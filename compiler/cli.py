"""planc: check, format, compile, inspect, estimate, explain, simulate, verify and run a plan."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from compiler.diagnostics import PlanError, render, to_json
from runtime.errors import ProgramError, TrainError

if TYPE_CHECKING:
    from torch import Tensor

    from compiler.dsl.plan import Plan
    from compiler.schedule.actions import Pipeline
    from compiler.schedule.costs import StageCosts


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0, or 1 for a mistake in the plan, or 2 for one in the command."""
    options = parser().parse_args(arguments)
    handler: Callable[[argparse.Namespace], int] = options.handler
    try:
        return handler(options)
    except PlanError as error:
        report(error, options)
        return 1
    except (ProgramError, TrainError) as error:
        if getattr(options, "json", False):
            print(json.dumps({"error": str(error)}))
        else:
            print(f"planc: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        return simulated_failure(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        print(f"planc: {error.strerror or error}{where}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("planc: interrupted", file=sys.stderr)
        return 130


def simulated_failure(error: RuntimeError) -> int:
    """Say which simulated rank failed, at what and why; any other error is raised."""
    import traceback

    from runtime.failing import cause_of
    from runtime.transport import RankFailure

    if not isinstance(error, RankFailure) or error.__cause__ is None:
        raise error
    cause = cause_of(error.__cause__)
    where = f" in {error.label!r}" if error.label else ""
    print(f"planc: rank {error.rank} failed{where}: {type(cause).__name__}: {cause}", file=sys.stderr)
    traceback.print_exception(cause)
    return 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="planc", description=__doc__)
    top.add_argument("--version", action=ShowVersion, nargs=0, help="print planc's version")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, handler: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        if name == "explain":
            sub.add_argument("name", metavar="NAME", help="a parameter, a module, a pattern of these, a value, or `all`")
        sub.add_argument("plan", metavar="PLAN", help="a .plan file")
        sub.set_defaults(handler=handler)
        if name != "fmt":
            sub.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="sets",
                             help="replace a name, a mesh axis or an option of the plan; may be repeated")  # fmt: skip
            sub.add_argument("--json", action="store_true", help="print for machines")
        return sub

    command("check", do_check, "check a plan and what it names, without building the model")
    fmt = command("fmt", do_fmt, "write a plan in the standard form")
    fmt.add_argument("--check", action="store_true", help="change nothing; exit 1 if the plan is not in that form")
    fmt.add_argument("--stdout", action="store_true", help="print the result instead of writing it")
    compiling = command("compile", do_compile, "compile a plan to a program folder")
    compiling.add_argument("-o", "--output", metavar="FOLDER", help="default: build/NAME")
    compiling.add_argument("--dump-after", action="append", default=[], metavar="PASS", help="print the graph after a pass (or `all`)")
    inspect = command("inspect", do_inspect, "print a plan's graph at any level")
    inspect.add_argument("--level", default="segments", choices=LEVEL_NAMES)
    inspect.add_argument("--segment", metavar="NAME", help="only this segment, such as layers.0")
    inspect.add_argument("--html", metavar="FILE", help="write a report instead: memory, time, traffic, graphs")
    inspect.add_argument("--svg", metavar="FILE", help="also draw `--level schedule` into a file")
    estimate = command("estimate", do_estimate, "memory, traffic and time of a step, without running it")
    estimate.add_argument("--svg", metavar="FILE", help="also draw the step into a file")
    command("explain", do_explain, "say why something is communicated: the rule, the plan's line, the bytes")
    simulate = command("simulate", do_simulate, "run all ranks of a plan in this process")
    simulate.add_argument("--steps", type=at_least_one, default=3, metavar="N", help="steps to take; default: 3")
    verify = command("verify", do_verify, "compare a plan with one-device eager PyTorch in float64")
    verify.add_argument("--steps", type=at_least_one, default=3, metavar="N", help="steps to compare; default: 3")
    verify.add_argument(
        "--ladder", action="store_true", help="turn the strategies on one at a time, and name the first that breaks"
    )
    run = command("run", do_run, "compile a plan and train it: on local processes, or as one of torchrun's")
    run.add_argument("-o", "--output", metavar="FOLDER", help="the program folder; default: build/NAME")
    run.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the run")
    run.add_argument("--trace", metavar="FILE", help="write a Chrome trace of three steps, with the measured bubble")
    return top


class ShowVersion(argparse.Action):
    """Looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from compiler.version import version

        print(f"{parser.prog} {version()}")
        parser.exit()


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


LEVEL_NAMES = ("captured", "layouts", "segments", "local", "instructions", "schedule")


def report(error: PlanError, options: argparse.Namespace) -> None:
    if getattr(options, "json", False):
        indent = None if options.command == "run" else 2  # one object per line
        print(json.dumps({"diagnostics": to_json(error.diagnostics)}, indent=indent))
    else:
        print(render(error.diagnostics, error.sources, color=sys.stderr.isatty()), file=sys.stderr)


def show_warnings(diagnostics: Sequence, sources: dict) -> None:  # type: ignore[type-arg]
    if diagnostics:
        print(render(diagnostics, sources, color=sys.stderr.isatty()), file=sys.stderr)


def terminal() -> Console:
    """Standard output; tables may be wide where it is no terminal."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=140)


def do_check(options: argparse.Namespace) -> int:
    from compiler.dsl import load
    from compiler.outside import check_outside
    from compiler.tensor.topology import across_nodes

    plan = load(options.plan, options.sets)
    check_outside(plan)
    warnings = [*plan.warnings, *across_nodes(plan)]
    if options.json:
        print(json.dumps({"diagnostics": to_json(warnings)}, indent=2))
        return 0
    show_warnings(warnings, dict(plan.sources))
    mesh = " ".join(f"{axis.name}={axis.size}" for axis in plan.mesh) or "one device"
    print(f"{options.plan}: ok ({plan.ranks} rank{'s' if plan.ranks != 1 else ''}: {mesh})")
    return 0


def do_fmt(options: argparse.Namespace) -> int:
    from compiler.dsl import format_text

    path = Path(options.plan)
    text = read_plan(path)
    result = format_text(text)
    if options.stdout:
        sys.stdout.write(result)
    elif options.check:
        if result != text:
            print(f"{path}: not in the standard form; run: planc fmt {path}", file=sys.stderr)
            return 1
    elif result != text:
        path.write_text(result)
        print(f"{path}: formatted")
    return 0


def do_compile(options: argparse.Namespace) -> int:
    from compiler.driver import Options, compile
    from compiler.ir.text import print_graph
    from compiler.report.show import compilation_json, print_compilation

    def watch(name: str, graph: object) -> None:
        if name in options.dump_after or "all" in options.dump_after:
            print(f"# after {name}\n{print_graph(graph)}")  # type: ignore[arg-type]

    compilation = compile(options.plan, options.sets, Options(watch=watch if options.dump_after else None))
    folder = compilation.write(output_folder(options, compilation.program.name))
    if options.json:
        print(json.dumps(compilation_json(compilation, folder), indent=2))
    else:
        show_warnings(compilation.warnings, dict(compilation.plan.sources))
        print_compilation(terminal(), compilation, folder)
    return 0


def read_plan(path: Path) -> str:
    from compiler.diagnostics import Diagnostics
    from compiler.dsl.files import read_text

    diagnostics = Diagnostics()
    text = read_text(str(path), diagnostics)
    diagnostics.raise_if_errors()
    assert text is not None
    return text


def output_folder(options: argparse.Namespace, name: str) -> Path:
    return Path(options.output) if options.output else Path("build") / name


def do_inspect(options: argparse.Namespace) -> int:
    from compiler.driver import compile
    from compiler.report.show import level_text

    if options.level == "schedule":
        return inspect_schedule(options)
    compilation = compile(options.plan, options.sets)
    if options.html:
        from compiler.report.html import html_report

        Path(options.html).write_text(html_report(compilation), "utf-8")
        print(json.dumps({"html": options.html}) if options.json else f"report: {options.html}")
        return 0
    text = level_text(compilation, options.level, options.segment)
    if not text.strip():
        known = ", ".join(call.name for call in compilation.program.calls)
        print(f"planc: no segment {options.segment!r}; there are: {known}", file=sys.stderr)
        return 2
    print(json.dumps({"level": options.level, "text": text}) if options.json else text, end="" if not options.json else "\n")
    return 0


def inspect_schedule(options: argparse.Namespace) -> int:
    from compiler.dsl import load
    from compiler.report.pictures import schedule_picture
    from compiler.report.timeline import to_svg, to_text
    from compiler.schedule.timing import peak_activations, simulate

    plan = load(options.plan, options.sets)
    if plan.pipeline is None:
        print(f"planc: {options.plan} has no `pipeline`, and so no schedule", file=sys.stderr)
        return 2
    schedule, costs = scheduled(plan)
    picture = schedule_picture(plan.pipeline.schedule, schedule, costs)
    if options.svg:
        Path(options.svg).write_text(to_svg(picture))
    if options.json:
        timing, alive = simulate(schedule, costs), peak_activations(schedule).ranks
        figures = {"makespan": timing.makespan, "bubble": timing.bubble, "idle": timing.idle, "alive": alive}
        print(json.dumps({"level": "schedule", "text": str(schedule), **figures}))
    else:
        console = terminal()
        console.print(to_text(picture, console.width), end="")
    return 0


def scheduled(plan: Plan) -> tuple[Pipeline, StageCosts | None]:
    """A plan's schedule. That of `auto` depends on what the stages cost, which takes a compile."""
    from compiler.analysis.machine import machine
    from compiler.driver import compile
    from compiler.pipeline.staging import pipeline_axis
    from compiler.schedule.planned import plan_schedule

    if plan.pipeline is None or plan.pipeline.schedule != "auto" or not pipeline_axis(plan):
        return plan_schedule(plan), None
    compilation = compile(plan)
    staging = compilation.linked.staging
    assert staging.schedule is not None
    return staging.schedule, staging.costs(plan, machine(plan, compilation.mesh))


def do_estimate(options: argparse.Namespace) -> int:
    from compiler.analysis.estimate import estimate
    from compiler.driver import compile
    from compiler.report.estimate import estimate_json, print_estimate
    from compiler.report.pictures import step_picture
    from compiler.report.timeline import to_svg

    compilation = compile(options.plan, options.sets)
    found = estimate(compilation)
    if options.svg:
        Path(options.svg).write_text(to_svg(step_picture(compilation.program.name, found.time)))
    if options.json:
        print(json.dumps(estimate_json(found), indent=2))
        return 0
    show_warnings(compilation.warnings, dict(compilation.plan.sources))
    print_estimate(terminal(), found)
    return 0


def do_explain(options: argparse.Namespace) -> int:
    from compiler.analysis.dry_run import dry_run
    from compiler.analysis.explain import explain, is_name, known_names
    from compiler.diagnostics import closest
    from compiler.driver import compile
    from compiler.report.explain import explanations_json, print_explanations

    compilation = compile(options.plan, options.sets)
    stages = len(compilation.program.streams)
    found = [item for stage in range(stages) for item in explain(compilation, dry_run(compilation, stage))]
    chosen = [part for item in found if (part := item.about(options.name)) is not None]
    if options.json:
        print(json.dumps(explanations_json(chosen), indent=2))
        return 0
    if not chosen:
        known = known_names(compilation)
        if any(is_name(options.name, name) for name in known):
            print(f"nothing is communicated for {options.name}")
            return 0
        near = closest(options.name, known)
        help = f"did you mean {near}?" if near else f"see: planc inspect {options.plan} --level layouts"
        print(f"planc: {options.plan} has no parameter, module or value {options.name!r}; {help}", file=sys.stderr)
        return 2
    show_warnings(compilation.warnings, dict(compilation.plan.sources))
    print_explanations(terminal(), chosen, stages)
    return 0


def do_simulate(options: argparse.Namespace) -> int:
    import tempfile

    from compiler.analysis.verify import random_batch
    from compiler.driver import compile
    from runtime.program import load
    from runtime.simulate import simulate

    compilation = compile(options.plan, options.sets)
    show_warnings(compilation.warnings, dict(compilation.plan.sources))
    with tempfile.TemporaryDirectory(prefix="planc-") as folder:
        program = load(compilation.write(Path(folder) / compilation.program.name))
        batches = [random_batch(program, step) for step in range(options.steps)]
        if program.mode == "forward" and "loss" not in {output.name for output in program.outputs}:
            returned = simulate(program, lambda session: [session.forward(batch) for batch in batches])
            show_returned(program.world, returned[0], options)
            return 0
        results = simulate(program, lambda session: [session.step(batch) for batch in batches])
    if options.json:
        print(json.dumps({"ranks": program.world, "losses": [r.loss for r in results[0]]}))
        return 0
    for step, result in enumerate(results[0], 1):
        metrics = "".join(f"  {name} {value:.6g}" for name, value in result.metrics.items())
        print(f"step {step}: loss {result.loss:.6g}{metrics}")
    print(f"{program.world} ranks simulated in this process on random batches")
    return 0


def show_returned(ranks: int, returned: Sequence[Mapping[str, Tensor]], options: argparse.Namespace) -> None:
    """What a program without a loss returned in each step: the names and shapes of whole tensors."""
    shapes = [{name: list(tensor.shape) for name, tensor in found.items()} for found in returned]
    if options.json:
        print(json.dumps({"ranks": ranks, "outputs": shapes}))
        return
    for step, found in enumerate(shapes, 1):
        print(f"step {step}: " + "  ".join(f"{name} {shape}" for name, shape in found.items()))
    print(f"{ranks} ranks simulated in this process on random batches")


def do_verify(options: argparse.Namespace) -> int:
    from compiler.analysis.verify import TOLERANCE, verify
    from compiler.dsl import load

    if options.ladder:
        return climb_ladder(options)
    verdict = verify(load(options.plan, options.sets), options.steps)
    if options.json:
        worst = [{"what": d.what, "error": d.error} for d in verdict.deviations[:10]]
        print(json.dumps({"ok": verdict.ok, "ranks": verdict.ranks, "not_finite": verdict.broken or None, "worst": worst}))
    elif verdict.broken:
        print(
            f"{options.plan}: nothing to compare: the model itself is not finite on one device, in the {verdict.broken}; "
            "verify takes random batches in float64"
        )
    else:
        shown = verdict.deviations[: 1 if verdict.ok else 8]
        state = "equal to" if verdict.ok else "NOT equal to"
        print(
            f"{options.plan}: {verdict.ranks} ranks, {verdict.steps} steps in float64: {state} one-device eager PyTorch "
            f"({len(verdict.deviations)} comparisons, tolerance {TOLERANCE:g})"
        )
        for item in shown:
            print(f"  relative error {item.error:.2e}: {item.what}")
    return 0 if verdict.ok else 1


def climb_ladder(options: argparse.Namespace) -> int:
    from compiler.analysis.ladder import Step, climb
    from compiler.dsl import load

    found: list[dict[str, object]] = []

    def tell(step: Step) -> None:
        worst = step.verdict.worst
        found.append({"added": step.rung.added, "ranks": step.verdict.ranks, "ok": step.verdict.ok, "error": worst.error})
        if not options.json:
            mark = "ok " if step.verdict.ok else "BAD"
            ranks = f"{step.verdict.ranks} rank" + ("s" if step.verdict.ranks > 1 else "")
            broken = step.verdict.broken
            what = f"not finite on one device: {broken}" if broken else f"{worst.error:.1e}  {worst.what}"
            print(f"{mark} + {step.rung.added:<24} {ranks:>9}   {what}", flush=True)

    broken = climb(load(options.plan, options.sets), options.steps, tell)
    if options.json:
        print(json.dumps({"ok": broken is None, "rungs": found}))
    elif broken is not None:
        print(f"the first to break: {broken.rung.added}")
    return 0 if broken is None else 1


def plan_and_sets(options: argparse.Namespace) -> str:
    """The plan as it was given, for the hints at the end of a run."""
    return shlex.join([options.plan, *(word for item in options.sets for word in ("--set", item))])


def do_run(options: argparse.Namespace) -> int:
    from compiler.driver import compile
    from compiler.dsl import load
    from compiler.outside import check_data
    from compiler.report.show import print_compilation
    from runtime.train import check_run
    from runtime.transport.launch import launch, under_torchrun

    if under_torchrun():
        from runtime.failing import leave
        from runtime.train import train

        folder = output_folder(options, Path(options.plan).stem)
        if not (folder / "program.yaml").exists():
            print(f"planc: compile first: planc compile {options.plan} -o {folder}", file=sys.stderr)
            return 2
        typed, trace = plan_and_sets(options), options.trace
        return leave(train(folder, resume=options.resume, plan=typed, trace=trace, json=options.json))
    plan = load(options.plan, options.sets)
    check_data(plan)
    compilation = compile(plan)
    folder = compilation.write(output_folder(options, compilation.program.name))
    show_warnings(compilation.warnings, dict(compilation.plan.sources))
    check_run(compilation.program, options.trace)
    if not options.json:
        print_compilation(terminal(), compilation, folder)
    arguments = ["-m", "runtime", str(folder), "--plan", plan_and_sets(options), *(["--resume"] if options.resume else [])]
    arguments += ["--trace", options.trace] if options.trace else []
    arguments += ["--json"] if options.json else []
    return launch(compilation.program.world, arguments, json=options.json)


if __name__ == "__main__":
    sys.exit(main())
