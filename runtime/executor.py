"""The executor: runs a rank's instruction stream for one step.

Each instruction is one method. Tensors live in slots, one set for each micro-batch; gradients of slots are summed as
they arrive, those of parameters go straight into the flat buffer of their bucket. What is in a slot is contiguous, as
segments take it for and stages send it: their code sees to that, but a device's kernels may choose other strides than
the code was traced with.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from runtime.context import RankContext
from runtime.instructions import OPERATIONS, Instruction
from runtime.loss_scale import LossScale, overflow
from runtime.mesh import TIME
from runtime.norms import GradientNorms
from runtime.optimizer import FlatOptimizer, clip_coefficient
from runtime.program import Call, Message, Output, Program
from runtime.state import RankState
from runtime.store import Store
from runtime.transport import Work


@dataclass
class StepResult:
    """What a step reports: Python numbers, the same on every rank.

    Of the gradients before they are clipped, where the plan clips their norm: `grad_norm`, and `grad_norms` by module.
    With a loss scale: the step's `loss_scale`, and whether it was `skipped` because gradients overflowed. `tensors`: what
    a forward-only program returns, this rank's part of each micro-batch, on the pipeline stage that makes it; then `loss` is
    NaN unless it is asked for.
    """

    loss: float
    metrics: dict[str, float]
    grad_norm: float | None = None
    grad_norms: dict[str, float] = field(default_factory=dict)
    loss_scale: float | None = None
    skipped: bool = False
    tensors: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)


class InstructionError(RuntimeError):
    """An instruction failed; the message names it, the segment and the rank. The cause is chained."""


@dataclass
class _Micro:
    """What is alive of one micro-batch. `saved` is what a call's forward hands to its backward, `kept` what the input
    part of its backward hands to the weight part."""

    slots: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    saved: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    kept: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def add(self, slot: str, gradient: Tensor) -> None:
        """Gradients of a slot are summed as they arrive."""
        known = self.gradients.get(slot)
        self.gradients[slot] = gradient if known is None else known + gradient


def load_kinds(program: Program) -> dict[str, ModuleType]:
    """The generated modules of a program, by kind."""
    modules = {}
    for kind, file in program.kinds.items():
        assert program.folder is not None
        path = program.folder / file
        name = f"planc_program_{abs(hash(str(path.resolve())))}_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # so that debuggers and pickling of errors find it
        spec.loader.exec_module(module)
        modules[kind] = module
    return modules


def point_at(optimizer: FlatOptimizer, parts: Sequence[tuple[str, int, int, bool]], own: Tensor) -> None:
    """Let an optimizer's groups update `own`, which holds the own part of a store's parameters."""
    for group, (_, start, end, _) in zip(optimizer.groups, parts, strict=True):
        group.param = own[start:end]


class Executor:
    """One rank's step. The optimizer is None for programs that only compute gradients."""

    def __init__(
        self, program: Program, kinds: Mapping[str, ModuleType], context: RankContext, state: RankState,
        optimizers: Mapping[str, FlatOptimizer], loss_scale: LossScale | None = None,
    ):  # fmt: skip
        self.program, self.kinds, self.context, self.state = program, kinds, context, state
        self.optimizers, self.loss_scale = optimizers, loss_scale
        self.norms = GradientNorms(program, context, state)
        self.stream = program.streams[state.stage]
        self.calls = {call.name: call for call in program.calls}
        self.outputs = {output.slot: output for output in program.outputs}
        self.results = {result.slot for result in program.results}
        self.messages = {message.slot: message for message in program.messages}
        self.inputs = {spec.name: spec for spec in program.inputs}
        self.actions: dict[str, Callable[[Instruction], None]] = {op: getattr(self, f"do_{op}") for op in OPERATIONS}

    @property
    def number(self) -> int:
        """The step at work, as people count: from 1."""
        return self.context.step + 1

    def run(self, batch: Mapping[str, Tensor], rows: int, lr: float) -> StepResult:
        """One step on this rank's part of the batch; `rows` of the whole batch are real. Updates the state in place.

        Raises InstructionError, naming the instruction, with the cause chained.
        """
        self.batch, self.lr = batch, lr
        self.context.real_rows = rows
        self.micros = [_Micro() for _ in range(self.program.microbatches)]
        self.once: dict[str, Tensor] = {}
        self.touched: set[str] = set()
        self.arrived: set[str] = set()
        self.pending: dict[Instruction, tuple[Work, Callable[[], None]]] = {}
        self.reported: dict[str, Tensor] = {}
        self.returned: dict[str, list[Tensor]] = {}
        self.coefficient: Tensor | None = None
        self.squares: Tensor | None = None
        self.skipped = False
        self.result: StepResult | None = None
        with torch.no_grad():
            for instruction in self.stream:
                self.context.where = str(instruction)
                self.context.transport.describe(f"{self.context.where} (step {self.number})")
                try:
                    self.actions[instruction.op](instruction)
                except Exception as error:
                    where = f"rank {self.context.transport.rank}, step {self.number}, `{self.context.where}`"
                    raise InstructionError(f"{where}: {error}") from error
        self.context.step += 1
        assert self.result is not None
        return self.result

    # -- compute -------------------------------------------------------------------------------------------------

    def do_prologue(self, instruction: Instruction) -> None:
        call = self.program.prologue
        assert call is not None
        context = self.context
        context.coords[TIME], context.site = 0, call.site
        # Along time nothing is split here: the axis has one part.
        microbatches, context.sizes[TIME] = context.sizes[TIME], 1
        arguments = [
            self.batch[ref.removeprefix("batch:")] if ref.startswith("batch:") else self.state.resolve(ref)
            for ref in call.arguments
        ]
        results, _ = self.kinds[call.kind].forward(context, *arguments)
        context.sizes[TIME] = microbatches
        self.once = dict(zip((name.removeprefix("once:") for name in call.results), results))

    def enter(self, call: Call, instruction: Instruction) -> _Micro:
        assert instruction.micro is not None
        context = self.context
        context.coords[TIME], context.site = instruction.micro, call.site
        return self.micros[instruction.micro]

    def argument(self, reference: str, micro: int) -> Tensor:
        kind, colon, name = reference.partition(":")
        if not colon:
            return self.micros[micro].slots[reference]
        if kind == "batch":
            return self.rows_of(name, micro)
        if kind == "once":
            return self.once[name]
        return self.state.resolve(reference)

    def rows_of(self, name: str, micro: int) -> Tensor:
        """Micro-batch `micro` of this rank's rows of an input."""
        tensor, dim = self.batch[name], self.inputs[name].batch_dim
        parts = self.program.microbatches
        if dim is None or parts == 1:
            return tensor
        rows = tensor.shape[dim] // parts
        return tensor.narrow(dim, micro * rows, rows).contiguous()

    def do_forward(self, instruction: Instruction) -> None:
        call = self.calls[instruction.target]
        micro = self.enter(call, instruction)
        arguments = [self.argument(ref, instruction.micro or 0) for ref in call.arguments]
        results, saved = self.kinds[call.kind].forward(self.context, *arguments)
        micro.slots.update((slot, value.contiguous()) for slot, value in zip(call.results, results))
        if saved:
            micro.saved[call.name] = saved
        for slot, value in zip(call.results, results):
            if slot in self.outputs:
                self.collect(self.outputs[slot], value)
            if slot in self.results:
                self.returned.setdefault(slot, []).append(value)

    def do_backward(self, instruction: Instruction) -> None:
        call, micro, module = self.enter_backward(instruction)
        references = self.aim(call, module.WANTED)
        self.take(micro, references, module.backward(self.context, self.passed(call, instruction, module.NEEDED)))

    def do_backward_input(self, instruction: Instruction) -> None:
        call, micro, module = self.enter_backward(instruction)
        references = self.aim(call, module.WANTED_INPUT)
        passed = self.passed(call, instruction, module.NEEDED_INPUT)
        gradients, micro.kept[call.name] = module.backward_input(self.context, passed)
        self.take(micro, references, gradients)

    def do_backward_weight(self, instruction: Instruction) -> None:
        call, micro, module = self.enter_backward(instruction)
        references = self.aim(call, module.WANTED_WEIGHT)
        arguments = [self.argument(call.arguments[k], instruction.micro or 0) for k in module.NEEDED_WEIGHT]
        arguments += micro.kept.pop(call.name)
        self.take(micro, references, module.backward_weight(self.context, arguments))

    def enter_backward(self, instruction: Instruction) -> tuple[Call, _Micro, ModuleType]:
        call = self.calls[instruction.target]
        return call, self.enter(call, instruction), self.kinds[call.kind]

    def passed(self, call: Call, instruction: Instruction, needed: Sequence[int]) -> list[Tensor]:
        """What a backward gets: arguments of the call, what the forward saved, and the gradients of results.

        In a list that it empties: so nobody else holds them, and its code frees each behind its last use. (The arguments
        of a Python call live until it returns.)
        """
        number = instruction.micro or 0
        micro, module = self.micros[number], self.kinds[call.kind]
        arguments = [self.argument(call.arguments[k], number) for k in needed]
        cotangents = [self.cotangent(micro, call.results[k]) for k in module.GIVEN]
        return [*arguments, *micro.saved.pop(call.name, ()), *cotangents]

    def aim(self, call: Call, wanted: Sequence[int]) -> list[str]:
        """The references of the arguments that get a gradient; products may go straight into their buffers."""
        references = [call.arguments[k] for k in wanted]
        self.context.targets = [self.target(reference) for reference in references]
        return references

    def take(self, micro: _Micro, references: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        """Sum gradients where they belong; None stands for one that is in its buffer already."""
        self.context.targets = []  # no view may outlive its buffer
        for reference, gradient in zip(references, gradients, strict=True):
            if gradient is None:
                self.touched.add(reference.removeprefix("param:"))
            elif reference.startswith("param:"):
                self.accumulate(reference.removeprefix("param:"), gradient)
            else:
                micro.add(reference, gradient.contiguous())

    def cotangent(self, micro: _Micro, slot: str) -> Tensor:
        """The gradient of a result: 1 for the loss, or the loss scale; else what its readers gave."""
        if slot in micro.gradients:
            return micro.gradients.pop(slot)
        loss = self.outputs.get(slot)
        assert loss is not None and loss.name == "loss", f"no gradient for {slot}"
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        # By way of float64: a scale may be larger than the loss's dtype has numbers.
        return torch.tensor(scale, dtype=torch.float64, device=self.context.device).to(micro.slots[slot].dtype)

    def target(self, reference: str) -> tuple[Tensor, bool] | None:
        """Where a parameter's gradient goes, and whether it is the first of this step."""
        kind, _, name = reference.partition(":")
        return (self.state.gradient(name), name not in self.touched) if kind == "param" else None

    def accumulate(self, name: str, gradient: Tensor) -> None:
        """The first gradient of a step (or since `begin`) overwrites what the buffer held, later ones add to it."""
        view = self.state.gradient(name)
        if name in self.touched:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.touched.add(name)

    def do_drop(self, instruction: Instruction) -> None:
        assert instruction.micro is not None
        slots = self.micros[instruction.micro].slots
        for name in instruction.targets:
            slots.pop(name, None)

    # -- communication -------------------------------------------------------------------------------------------

    def start(self, instruction: Instruction, work: Work, done: Callable[[], None] = lambda: None) -> None:
        """Remember what is under way; `done` is called when it has been waited for."""
        self.pending[instruction] = (work, done)

    def do_wait(self, instruction: Instruction) -> None:
        work, done = self.pending.pop(instruction.waited)
        work.wait()
        done()

    def label(self, instruction: Instruction, axes: tuple[str, ...]) -> str:
        return f"{instruction} over {','.join(axes)} (step {self.number})"

    def do_gather(self, instruction: Instruction) -> None:
        store = self.state.stores[instruction.target]
        axes = store.bucket.shard
        group, label = self.context.group(axes), self.label(instruction, axes)
        work = self.context.transport.all_gather(store.open(), store.on_device, group, wait=False, label=label)
        self.start(instruction, work, store.unstage)

    def do_free(self, instruction: Instruction) -> None:
        self.state.stores[instruction.target].close()

    def do_begin(self, instruction: Instruction) -> None:
        store = self.state.stores[instruction.target]
        store.begin()
        self.touched -= set(store.bucket.parameters)

    def do_reduce(self, instruction: Instruction) -> None:
        store = self.state.stores[instruction.target]
        bucket, transport = store.bucket, self.context.transport
        axes = bucket.shard or bucket.axes
        group, label = self.context.group(axes, bucket.stages), self.label(instruction, axes)
        assert store.gradient is not None
        for name in store.spans.keys() - self.touched:  # only another stage's copy has a gradient
            self.state.gradient(name).zero_()
        if not bucket.shard:
            self.start(instruction, transport.all_reduce(store.gradient, group, wait=False, label=label))
            return
        out = store.arrive(bucket.name not in self.arrived)
        self.arrived.add(bucket.name)
        work = transport.reduce_scatter(out, store.gradient, group, wait=False, label=label)
        self.start(instruction, work, store.arrived)

    def do_reduce_across(self, instruction: Instruction) -> None:
        store = self.state.stores[instruction.target]
        axes = store.bucket.across
        assert store.reduced is not None
        work = self.context.transport.all_reduce(
            store.reduced, self.context.group(axes, store.bucket.stages), wait=False, label=self.label(instruction, axes)
        )
        self.start(instruction, work)

    def do_send(self, instruction: Instruction) -> None:
        assert instruction.micro is not None and instruction.peer is not None
        micro, name = self.micros[instruction.micro], instruction.target
        tensor = micro.gradients.pop(name.removeprefix("d:")) if name.startswith("d:") else micro.slots[name]
        tensor = self.slice_of(tensor, self.messages[name])
        rank = self.context.peer(self.program.pipeline, instruction.peer)
        # The work keeps the tensor until it has been sent.
        self.start(
            instruction, self.context.transport.send(tensor, rank, wait=False, label=f"{instruction} (step {self.number})")
        )

    def do_recv(self, instruction: Instruction) -> None:
        assert instruction.micro is not None and instruction.peer is not None
        micro, name = self.micros[instruction.micro], instruction.target
        message = self.messages[name]
        tensor = torch.empty(message.shape, dtype=getattr(torch, message.dtype), device=self.context.device)
        part, transport = self.slice_of(tensor, message), self.context.transport
        rank = self.context.peer(self.program.pipeline, instruction.peer)
        work = transport.recv(part, rank, wait=False, label=f"{instruction} (step {self.number})")

        def arrived() -> None:
            if message.over:
                group = self.context.group(message.over)
                transport.all_gather(tensor, part, group, label=self.label(instruction, message.over))
            if name.startswith("d:"):
                micro.add(name.removeprefix("d:"), tensor)
            else:
                micro.slots[name] = tensor

        self.start(instruction, work, arrived)

    def slice_of(self, tensor: Tensor, message: Message) -> Tensor:
        """What of a message this rank sends and receives itself: all of it, or its slice."""
        if not message.over:
            return tensor
        group = self.context.group(message.over)
        return tensor.view(len(group), -1)[group.index(self.context.transport.rank)]

    def do_load(self, instruction: Instruction) -> None:
        self.start(instruction, self.state.stores[instruction.target].load())

    def do_unload(self, instruction: Instruction) -> None:
        store = self.state.stores[instruction.target]
        assert store.host_gradient is not None and store.reduced is not None
        self.start(instruction, store.transfer.start(store.host_gradient, store.reduced))

    def do_store(self, instruction: Instruction) -> None:
        store = self.state.stores[instruction.target]
        assert store.host is not None
        self.start(instruction, store.transfer.start(store.host, store.on_device), store.unstage)

    # -- gradients and the optimizer -----------------------------------------------------------------------------

    def gradients(self) -> list[Tensor]:
        """What this rank has of the reduced gradients."""
        return [store.reduced for store in self.state.stores.values() if store.reduced is not None]

    def do_finite(self, instruction: Instruction) -> None:
        assert self.loss_scale is not None
        context, gradients = self.context, self.gradients()
        found = overflow(gradients, context.device)
        everyone = context.group(context.mesh.names)
        context.transport.all_reduce(found, everyone, op="max", label=f"finite (step {self.number})")
        self.skipped = bool(found)
        torch._foreach_mul_(gradients, 1.0 / self.loss_scale.value)

    def do_clip(self, instruction: Instruction) -> None:
        """One norm over every element of the model, each counted once (Pascanu et al. 2013)."""
        clip = self.program.clip or {}
        gradients = self.gradients()
        if "grad_value" in clip:
            for gradient in gradients:
                gradient.clamp_(-clip["grad_value"], clip["grad_value"])
        if "grad_norm" in clip:
            self.squares = self.norms()
            self.coefficient = clip_coefficient(self.squares.sum().sqrt(), clip["grad_norm"])
            here = [store.reduced for store in self.state.stores.values() if self.scales_here(store)]
            if here:
                torch._foreach_mul_(here, self.coefficient)

    def scales_here(self, store: Store) -> bool:
        """Whether clipping scales the gradients itself; else the optimizer does as it reads them."""
        return store.reduced is not None and (not self.optimizers or store.host_gradient is not None)

    def do_step(self, instruction: Instruction) -> None:
        if self.skipped:
            return
        store = self.state.stores[instruction.target]
        assert store.reduced is not None
        optimizer, reduced = self.optimizers[instruction.target], store.reduced
        scale = 1.0 if self.coefficient is None or self.scales_here(store) else self.coefficient
        if store.host_gradient is not None:
            reduced = store.host_gradient
        parts = list(store.decays())
        visiting = store.shard is None and store.host_gradient is None  # the parameters are here for the step alone
        if visiting:
            point_at(optimizer, parts, store.on_device)
        optimizer.step(self.lr, [reduced[start:end] for _, start, end, _ in parts], grad_scale=scale)
        if visiting:
            assert store.host is not None
            point_at(optimizer, parts, store.host)

    # -- buffers and reports -------------------------------------------------------------------------------------

    def collect(self, output: Output, value: Tensor) -> None:
        known = self.reported.get(output.name)
        value = value.detach().to(torch.float64)  # many small terms, maybe of a lower dtype
        if known is None:
            self.reported[output.name] = value.clone()
        else:
            self.reported[output.name] = known + value if output.op == "sum" else torch.maximum(known, value)

    def do_update(self, instruction: Instruction) -> None:
        for buffer in self.program.buffers:
            if buffer.update is None or buffer.stage != self.state.stage:
                continue
            if buffer.average:
                parts = [micro.slots[buffer.update] for micro in self.micros]
                new = torch.stack(parts).mean(0) if TIME in buffer.average and parts[0].is_floating_point() else parts[-1]
                axes = tuple(axis for axis in buffer.average if axis != TIME)
                if axes:
                    new = self.context.all_reduce(new, axes, "sum") / len(self.context.group(axes))
            else:
                new = self.micros[-1].slots[buffer.update]
            self.state.buffers[buffer.name].copy_(new)

    def do_report(self, instruction: Instruction) -> None:
        """All reported scalars in one message for each set of axes and operation."""
        found: dict[str, float] = {}
        sets: dict[tuple[tuple[str, ...], str], list[Output]] = {}
        for output in self.program.outputs:
            sets.setdefault((output.axes, output.op), []).append(output)
        for (axes, op), outputs in sets.items():
            # What another pipeline stage makes adds nothing here.
            nothing = torch.full((), 0.0 if op == "sum" else -math.inf, dtype=torch.float64, device=self.context.device)
            packed = torch.stack([self.reported.get(o.name, nothing) for o in outputs])
            if axes:
                packed = self.context.all_reduce(packed, axes, op)
            found.update(zip((o.name for o in outputs), packed.tolist()))
        self.result = StepResult(found.pop("loss", math.nan), found, skipped=self.skipped)
        self.result.tensors = {result.name: tuple(self.returned.get(result.slot, ())) for result in self.program.results}
        if self.squares is not None:
            norms = self.squares.sqrt().tolist()
            self.result.grad_norm = math.hypot(*norms)
            self.result.grad_norms = dict(zip(self.norms.groups, norms))
        if self.loss_scale is not None:
            self.result.loss_scale = self.loss_scale.value
            self.loss_scale.update(self.skipped)
