"""The dry run: a rank's step on tensors without data, through the very code that runs it.

The runtime's own session, executor, context and optimizer run the program's streams on device "meta": what they
allocate, when they let go of it, and what they send, in which order, is written down as `events`. So nothing here says
again what an instruction does, and what the runtime learns the readers know.

What is left out is the arithmetic, and repetition: the code of a segment runs once for each distinct situation, and is
then replayed: its events are shared, its results are made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiler.analysis.dry_transport import DryTransport
from compiler.analysis.events import Event
from compiler.analysis.replay import ReplayedKind
from compiler.analysis.storage import StorageTracker
from compiler.emit.folder import kind_source
from compiler.emit.lines import node_lines
from compiler.ir.graph import Node
from runtime.devices import STANDS_FOR
from runtime.instructions import Instruction
from runtime.mesh import Mesh
from runtime.program import Program
from runtime.session import Session

if TYPE_CHECKING:
    from compiler.driver import Compilation

ACTIVATIONS, PARAMETERS, GRADIENTS, OPTIMIZER = "activations", "parameters", "gradients", "optimizer"
BATCH, BUFFERS, OTHER, HOST = "batch", "buffers", "other", "host"
TEMPORARIES, COMMUNICATION = "temporaries", "communication"

KEPT: dict[str, str] = {
    "gather": PARAMETERS,
    "load": PARAMETERS,
    "begin": GRADIENTS,
    "reduce": GRADIENTS,
    "reduce_across": GRADIENTS,
    "step": OPTIMIZER,
    "update": BUFFERS,
}
"""What an instruction leaves behind, by its operation; where nothing is said, activations."""


def kept(instruction: Instruction) -> str:
    """The category of what lives on behind an instruction."""
    return KEPT.get(instruction.op, ACTIVATIONS)


@dataclass
class Step:
    """One instruction: the live bytes by category before it, and its events in order, in chunks that may be shared."""

    instruction: Instruction
    before: dict[str, int]
    chunks: list[Sequence[Event]] = field(default_factory=list)

    @property
    def events(self) -> Iterator[Event]:
        for chunk in self.chunks:
            yield from chunk


@dataclass
class DryRun:
    """One pipeline stage's step. `rank` is the one that was run; its fellows of the stage do the same. `code` has the
    node of each line of a kind's generated code, `kinds` the kind of each call. `host` are the bytes that lie in the
    memory of the host, where that is not the device's."""

    stage: int
    rank: int
    steps: list[Step]
    code: Mapping[str, Mapping[int, Node]]
    kinds: Mapping[str, str]
    host: int = 0

    def node(self, target: str, line: int) -> Node | None:
        """What runs at a line of the code of a call."""
        return self.code[self.kinds[target]].get(line) if line else None


def dry_run(compilation: Compilation, stage: int = 0) -> DryRun:
    """A step of a rank of pipeline stage `stage`, the second one: what the first leaves behind is there already."""
    program = compilation.program
    mesh = Mesh(tuple(program.mesh.items()))
    rank = stage_rank(program, mesh, stage)
    tracker = StorageTracker()
    transport = DryTransport(rank, mesh, tracker)
    sources = {name: kind_source(kind, program) for name, kind in compilation.linked.kinds.items()}
    kinds = {
        name: ReplayedKind(kind.code, load_source(name, sources[name]), tracker)
        for name, kind in compilation.linked.kinds.items()
    }
    token = STANDS_FOR.set(device_kind(compilation))
    try:
        with tracker, torch.no_grad():
            session = open_session(compilation, transport, kinds)  # type: ignore[arg-type]
            session.state.constants = {n: t.to("meta") for n, t in compilation.captured.constants.items()}
            tag_held(tracker, session)
            recorder = Recorder(tracker, session)
            for _ in range(2):
                recorder.steps = []
                session.step(local_batch(session), local=True)
            host = 0 if STANDS_FOR.get() == "cpu" else set_apart(recorder.steps)
    finally:
        STANDS_FOR.reset(token)
    code = {name: node_lines(kind, sources[name]) for name, kind in compilation.linked.kinds.items()}
    calls = (*program.calls, *((program.prologue,) if program.prologue else ()))
    return DryRun(stage, rank, recorder.steps, code, {call.name: call.kind for call in calls}, host)


def open_session(compilation: Compilation, transport: DryTransport, kinds: dict[str, Any]) -> Session:
    """The rank's session, with whatever the model's initialisation gives in its place, but no data."""
    program = compilation.program
    full = {
        spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        for spec in (*program.parameters, *program.buffers)
    }
    with torch.device("meta"):  # opaque modules are built here
        return Session(program, transport, full, kinds)


def tag_held(tracker: StorageTracker, session: Session) -> None:
    """What a session holds from its beginning."""
    state = session.state
    stores = list(state.stores.values())
    tracker.tag(GRADIENTS, [tensor for s in stores for tensor in (s.gradient, s.reduced) if tensor is not None])
    tracker.tag(HOST, [tensor for s in stores for tensor in s.on_host()])
    tracker.tag(PARAMETERS, [tensor for s in stores for tensor in (s.shard, s.whole) if tensor is not None])
    tracker.tag(PARAMETERS, state.alone)
    tracker.tag(OPTIMIZER, [s.master for s in stores if s.master is not None])
    tracker.tag(BUFFERS, [state.buffers, state.constants])
    for name, optimizer in session.optimizers.items():
        category = HOST if state.stores[name].host_gradient is not None else OPTIMIZER
        tracker.tag(category, [vars(optimizer), optimizer.state_tensors()])
    tracker.tag(PARAMETERS, [list(module.parameters()) for module in session.context.opaque_modules.values()])
    tracker.tag(OTHER)


def set_apart(steps: Sequence[Step]) -> int:
    """Take what lies on the host out of the device's memory; its bytes, the same at all times."""
    (size,) = {step.before.pop(HOST, 0) for step in steps}
    return size


class Recorder:
    """Writes a step for each instruction that the session's executor runs."""

    def __init__(self, tracker: StorageTracker, session: Session):
        self.tracker = tracker
        self.steps: list[Step] = []
        actions = session.executor.actions
        session.executor.actions = {op: self.recorded(action) for op, action in actions.items()}

    def recorded(self, action: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
        tracker = self.tracker

        def run(instruction: Instruction) -> None:
            if not self.steps:
                tracker.tag(BATCH)
            step = Step(instruction, dict(tracker.bytes))
            self.steps.append(step)
            with tracker.into(step.chunks):
                action(instruction)
            tracker.tag(kept(instruction))

        return run


def local_batch(session: Session) -> dict[str, Tensor]:
    """A batch of this rank's rows."""
    start, end = session.row_range()
    found = {}
    for spec in session.program.inputs:
        shape = [end - start if dim == spec.batch_dim else size for dim, size in enumerate(spec.shape)]
        found[spec.name] = torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")
    return found


def stage_rank(program: Program, mesh: Mesh, stage: int) -> int:
    """The first rank of a pipeline stage."""
    return mesh.rank({axis: stage if axis == program.pipeline else 0 for axis in mesh.names})


def device_kind(compilation: Compilation) -> str:
    """The kind of device that the plan is for."""
    cluster = compilation.plan.cluster
    return "cpu" if cluster is None or cluster.device == "cpu" else "cuda"


def load_source(name: str, source: str) -> ModuleType:
    """A segment's module, of its text."""
    module = ModuleType(name)
    exec(compile(source, f"<segment {name}>", "exec"), module.__dict__)
    return module
