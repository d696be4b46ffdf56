"""What one pipeline stage's stream must keep: the rules of slots, gradients, buckets and waits.

The stream is run on states instead of tensors: whether a slot is here, coming or dropped, whether a bucket's parameters
are whole, what its gradients hold. Each instruction is one method, as in the executor; what it may not find is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from runtime.instructions import Instruction
from runtime.program import Bucket, Call, Program

COMING, HERE = "coming", "here"


@dataclass(frozen=True)
class Part:
    """A backward, or a part of one: indices of the call's arguments that it reads, and of those that get a gradient."""

    needed: tuple[int, ...]
    wanted: tuple[int, ...]


@dataclass(frozen=True)
class Code:
    """What a kind's code says of itself. `given`: the results whose gradients its backward takes. `parts`: of
    "backward", and of "backward_input" and "backward_weight" where the backward is split. `arguments` and `results`:
    (dtype, local shape) of each."""

    given: tuple[int, ...]
    parts: Mapping[str, Part]
    arguments: tuple[tuple[str, tuple[int, ...]], ...] = ()
    results: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Fault:
    """What is wrong at instruction `index` of a stage's stream (None: at its end)."""

    stage: int
    index: int | None
    instruction: Instruction | None
    message: str

    def __str__(self) -> str:
        where = "at the end" if self.index is None else f"line {self.index + 1}, `{self.instruction}`"
        return f"stage {self.stage}, {where}: {self.message}"


@dataclass
class _BucketState:
    """A bucket on this stage. `whole`: "", "coming" or "here"; `gradient`: whether its whole gradients take sums;
    `touched`: parameters that have one since; `reducing`: the reduction under way; `reduced`: how often; `loaded`,
    `unloaded`: whether the own part of the parameters is on the device, and that of the gradients on the host, of what
    lives elsewhere; `final`: the optimizer or the norm has read the gradients."""


    bucket: Bucket
    whole: str
    gradient: bool
    touched: set[str] = field(default_factory=set)
    reducing: bool = False
    reduced: int = 0
    across: str = ""
    loaded: str = ""
    unloaded: str = ""
    final: bool = False
    stepped: bool = False

    @property
    def outstanding(self) -> str:
        """Why the gradients cannot be read yet, if they cannot."""
        bucket = self.bucket
        if self.reducing or self.across == COMING:
            return "its reduction is not waited for"
        if (bucket.axes or bucket.shard) and (self.touched or not self.reduced):
            return "its gradients are not reduced"
        if bucket.across and self.across != HERE:
            return f"its own part is not summed over {', '.join(bucket.across)}"
        missing = set(bucket.parameters) - self.touched
        if not (bucket.axes or bucket.shard) and missing:
            return f"it has no gradient of {some(missing)}"
        return ""


def some(names: Iterable[str]) -> str:
    """At most three names."""
    shown = sorted(names)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def given(calls: Iterable[Call]) -> set[str]:
    """The parameters that calls have gradients for."""
    return {ref.removeprefix("param:") for call in calls for ref in call.gradients if ref.startswith("param:")}


class StageRules:
    """Runs one stream; `faults` is what is wrong with it."""

    def __init__(self, program: Program, codes: Mapping[str, Code], stage: int):
        self.program, self.codes, self.stage = program, codes, stage
        self.calls = {call.name: call for call in program.calls if stage in call.stages}
        self.parameters = {spec.name: spec for spec in program.parameters}
        self.others = given(program.calls) - given(self.calls.values())  # only other stages' copies have a gradient
        self.outputs = {output.slot: output for output in program.outputs}
        self.messages = {message.slot for message in program.messages}
        self.buckets = {
            b.name: _BucketState(b, "" if b.shard else HERE, b.trained and b.zero < 2)
            for b in program.buckets
            if stage in b.stages
        }
        self.home = {name: state for state in self.buckets.values() for name in state.bucket.parameters}
        self.faults: list[Fault] = []
        self.slots: dict[tuple[str, int], str] = {}
        self.gradients: dict[tuple[str, int], str] = {}
        self.used: set[tuple[str, int]] = set()  # gradients that have been taken
        self.dropped: dict[tuple[str, int], int] = {}
        self.done: set[tuple[str, str, int]] = set()  # (op, call, micro)
        self.pending: dict[Instruction, int] = {}
        self.prologue = self.unscaled = self.clipped = self.reported = False
        self.index: int | None = None
        self.instruction: Instruction | None = None

    def run(self, stream: Iterable[Instruction]) -> list[Fault]:
        for self.index, self.instruction in enumerate(stream):
            if self.reported:
                self.fault("comes after the report, which ends the step")
            getattr(self, f"do_{self.instruction.op}")(self.instruction)
        self.index = self.instruction = None
        self.end()
        return self.faults

    def fault(self, message: str) -> None:
        self.faults.append(Fault(self.stage, self.index, self.instruction, message))

    def require(self, condition: object, message: str) -> bool:
        if not condition:
            self.fault(message)
        return bool(condition)

    # -- compute -------------------------------------------------------------------------------------------------

    def do_prologue(self, instruction: Instruction) -> None:
        self.require(self.program.prologue, "the program has no prologue")
        self.prologue = True

    def do_forward(self, instruction: Instruction) -> None:
        call, micro = self.enter(instruction)
        if call is None:
            return
        for reference in call.arguments:
            self.read(reference, micro)
        for slot in call.results:
            self.slots[slot, micro] = HERE

    def do_backward(self, instruction: Instruction) -> None:
        self.backward(instruction)

    def do_backward_input(self, instruction: Instruction) -> None:
        self.backward(instruction)

    def do_backward_weight(self, instruction: Instruction) -> None:
        self.backward(instruction)

    def enter(self, instruction: Instruction) -> tuple[Call | None, int]:
        """The call of a compute instruction, if it is this stage's and does this for the first time."""
        call, micro = self.calls.get(instruction.target), instruction.micro
        if not self.require(call is not None, f"stage {self.stage} has no such call"):
            return None, 0
        if not self.require(micro is not None and 0 <= micro < self.program.microbatches, "no such micro-batch"):
            return None, 0
        key = (instruction.op, instruction.target, micro or 0)
        self.require(key not in self.done, "is done a second time")
        self.done.add(key)
        return call, micro or 0

    def backward(self, instruction: Instruction) -> None:
        call, micro = self.enter(instruction)
        if call is None:
            return
        op, code = instruction.op, self.codes[call.kind]
        before = "backward_input" if op == "backward_weight" else "forward"
        self.require((before, call.name, micro) in self.done, f"comes before its {before}")
        if op != "backward_weight":
            other = "backward" if op == "backward_input" else "backward_input"
            self.require((other, call.name, micro) not in self.done, f"repeats its {other}")
            for k in code.given:
                self.take_gradient(call.results[k], micro)
        part = code.parts[op]
        for k in part.needed:
            self.read(call.arguments[k], micro)
        for k in part.wanted:
            self.give_gradient(call.arguments[k], micro)

    def read(self, reference: str, micro: int) -> None:
        kind, colon, name = reference.partition(":")
        if not colon:
            self.read_slot(reference, micro)
        elif kind == "param":
            self.read_parameter(name)
        elif kind == "once":
            self.require(self.prologue, f"reads {reference} before the prologue")

    def read_slot(self, slot: str, micro: int) -> None:
        state, key = self.slots.get((slot, micro)), (slot, micro)
        if state == COMING:
            self.fault(f"reads {slot} @{micro}, whose receive is not waited for")
        elif state is None and key in self.dropped:
            self.fault(f"reads {slot} @{micro}, which line {self.dropped[key] + 1} has dropped")
        elif state is None:
            self.fault(f"reads {slot} @{micro}, which is not there yet")

    def read_parameter(self, name: str) -> None:
        self.require(self.stage in self.parameters[name].stages, f"reads {name}, which is not on stage {self.stage}")
        state = self.home.get(name)
        if state is None:
            return
        if state.stepped:
            self.fault(f"reads {name} after the optimizer has stepped {state.bucket.name}")
        elif state.whole == COMING:
            self.fault(f"reads {name}, but the gather of {state.bucket.name} is not waited for")
        elif not state.whole:
            self.fault(f"reads {name}, but {state.bucket.name} is not gathered")

    def take_gradient(self, slot: str, micro: int) -> None:
        """A backward, or a send, uses up the gradient of a slot; that of the loss is 1."""
        state = self.gradients.pop((slot, micro), None)
        self.used.add((slot, micro))
        if state == COMING:
            self.fault(f"reads the gradient of {slot} @{micro}, whose receive is not waited for")
        elif state is None:
            output = self.outputs.get(slot)
            if self.require(output and output.name == "loss", f"there is no gradient of {slot} @{micro}"):
                self.read_slot(slot, micro)

    def give_gradient(self, reference: str, micro: int) -> None:
        kind, _, name = reference.partition(":")
        if kind != "param":
            self.add_gradient(reference, micro, HERE)
            return
        state = self.home.get(name)
        if not self.require(state is not None, f"gives a gradient of {name}, which is in no bucket of this stage"):
            return
        assert state is not None
        bucket = state.bucket.name
        if state.final:
            self.fault(f"gives a gradient of {name} after that of {bucket} has been used")
        elif state.reducing:
            self.fault(f"gives a gradient of {name} after the reduction of {bucket} has begun")
        elif not state.gradient:
            self.fault(f"gives a gradient of {name}, but the gradients of {bucket} did not begin")
        elif state.bucket.zero < 2 and state.reduced:
            self.fault(f"gives a gradient of {name} after {bucket} has been reduced")
        state.touched.add(name)

    def add_gradient(self, slot: str, micro: int, state: str) -> None:
        self.require((slot, micro) not in self.used, f"gives a gradient of {slot} @{micro} after it has been used")
        self.gradients[slot, micro] = COMING if COMING in (state, self.gradients.get((slot, micro))) else HERE

    def do_drop(self, instruction: Instruction) -> None:
        for slot in instruction.targets:
            key = (slot, instruction.micro or 0)
            if self.require(self.slots.get(key) == HERE, f"there is no {slot} @{instruction.micro} to drop"):
                del self.slots[key]
                self.dropped[key] = self.index or 0

    # -- messages ------------------------------------------------------------------------------------------------

    def message(self, instruction: Instruction) -> tuple[str, int, bool]:
        """The slot, the micro-batch, and whether it is the slot's gradient."""
        peer = instruction.peer
        self.require(instruction.target in self.messages, f"the program has no message {instruction.target}")
        known = peer is not None and 0 <= peer < self.program.stages and peer != self.stage
        self.require(known, f"there is no other stage {peer}")
        slot = instruction.target.removeprefix("d:")
        return slot, instruction.micro or 0, slot != instruction.target

    def do_send(self, instruction: Instruction) -> None:
        slot, micro, gradient = self.message(instruction)
        if gradient:
            self.take_gradient(slot, micro)
        else:
            self.read_slot(slot, micro)
        self.start(instruction)

    def do_recv(self, instruction: Instruction) -> None:
        slot, micro, gradient = self.message(instruction)
        if gradient:
            self.add_gradient(slot, micro, COMING)
        else:
            self.require((slot, micro) not in self.slots, f"{slot} @{micro} is there already")
            self.slots[slot, micro] = COMING
        self.start(instruction)

    def start(self, instruction: Instruction) -> None:
        self.require(instruction not in self.pending, "is under way already")
        self.pending[instruction] = self.index or 0

    def do_wait(self, instruction: Instruction) -> None:
        started = instruction.waited
        if not self.require(started in self.pending, f"nothing has started `{started}`"):
            return
        del self.pending[started]
        if started.op == "recv":
            slot, micro, gradient = self.message(started)
            (self.gradients if gradient else self.slots)[slot, micro] = HERE
        elif started.op in ("gather", "load", "unload", "store", "reduce", "reduce_across"):
            getattr(self, f"end_{started.op}")(self.buckets[started.target])

    # -- buckets -------------------------------------------------------------------------------------------------

    def bucket(self, instruction: Instruction) -> _BucketState | None:
        state = self.buckets.get(instruction.target)
        self.require(state is not None, f"stage {self.stage} has no such bucket")
        return state

    def do_gather(self, instruction: Instruction) -> None:
        if state := self.bucket(instruction):
            self.require(state.bucket.shard, f"{state.bucket.name} is whole on every rank")
            self.require(not state.whole, f"{state.bucket.name} is gathered already")
            self.require(not state.stepped, f"{state.bucket.name} has been stepped: what it gathers is the next step's")
            if state.bucket.offload in ("params", "all"):
                self.require(state.loaded == HERE, f"{state.bucket.name} is not loaded from the host")
            state.whole = COMING
            self.start(instruction)

    def end_gather(self, state: _BucketState) -> None:
        state.whole = HERE
        state.loaded = ""

    # -- the host ------------------------------------------------------------------------------------------------

    def do_load(self, instruction: Instruction) -> None:
        if state := self.bucket(instruction):
            self.require(state.bucket.offload != "none", f"{state.bucket.name} has nothing on the host")
            self.require(not state.loaded, f"{state.bucket.name} is loaded already")
            if state.bucket.offload == "optimizer":
                self.require(state.stepped, f"{state.bucket.name} has not been stepped: nothing new is on the host")
            state.loaded = COMING
            self.start(instruction)

    def end_load(self, state: _BucketState) -> None:
        state.loaded = HERE

    def do_unload(self, instruction: Instruction) -> None:
        if state := self.bucket(instruction):
            self.require(state.bucket.offload in ("optimizer", "all"), f"{state.bucket.name} is stepped on the device")
            self.require(not state.unloaded, f"the gradients of {state.bucket.name} are on the host already")
            self.require(not state.outstanding, f"{state.bucket.name}: {state.outstanding}")
            state.unloaded, state.final = COMING, True
            self.start(instruction)

    def end_unload(self, state: _BucketState) -> None:
        state.unloaded = HERE

    def do_store(self, instruction: Instruction) -> None:
        if state := self.bucket(instruction):
            self.require(state.bucket.offload == "params", f"{state.bucket.name} is not stored on the host")
            self.require(state.stepped, f"{state.bucket.name} has not been stepped")
            self.require(state.loaded == HERE, f"{state.bucket.name} is not loaded")
            self.start(instruction)

    def end_store(self, state: _BucketState) -> None:
        state.loaded = ""

    def do_free(self, instruction: Instruction) -> None:
        if state := self.bucket(instruction):
            self.require(state.bucket.zero == 3, f"{state.bucket.name} stays whole")
            self.require(state.whole == HERE, f"{state.bucket.name} is not whole")
            state.whole = ""

    def do_begin(self, instruction: Instruction) -> None:
        if state := self.bucket(instruction):
            self.require(state.bucket.zero >= 2, f"the gradients of {state.bucket.name} are always there")
            self.require(not state.gradient, f"the gradients of {state.bucket.name} are there already")
            self.require(not state.final, f"the gradients of {state.bucket.name} have been used")
            state.gradient, state.touched = True, set()

    def do_reduce(self, instruction: Instruction) -> None:
        if state := self.bucket(instruction):
            bucket = state.bucket
            self.require(bucket.axes or bucket.shard, f"{bucket.name} is not reduced over any axis")
            self.require(state.gradient, f"the gradients of {bucket.name} did not begin")
            self.require(not state.reducing, f"{bucket.name} is being reduced already")
            self.require(bucket.zero >= 2 or not state.reduced, f"{bucket.name} has been reduced already")
            missing = set(bucket.parameters) - state.touched - self.others
            self.require(not missing, f"{bucket.name} has no gradient of {some(missing)}")
            state.reducing, state.touched = True, set()
            self.start(instruction)

    def end_reduce(self, state: _BucketState) -> None:
        state.reducing, state.reduced = False, state.reduced + 1
        if state.bucket.zero >= 2:
            state.gradient = False

    def do_reduce_across(self, instruction: Instruction) -> None:
        if state := self.bucket(instruction):
            self.require(state.bucket.across, f"{state.bucket.name} is not cut in shards that are summed")
            self.require(not state.across, f"{state.bucket.name} has been summed across already")
            state.across = HERE  # for the question what else is missing
            self.require(not state.outstanding, f"{state.bucket.name}: {state.outstanding}")
            state.across, state.final = COMING, True
            self.start(instruction)

    def end_reduce_across(self, state: _BucketState) -> None:
        state.across = HERE

    # -- the end of a step ---------------------------------------------------------------------------------------

    def do_clip(self, instruction: Instruction) -> None:
        self.require(self.program.clip, "the program clips nothing")
        self.require(not self.clipped, "is done a second time")
        self.require(self.unscaled or not self.program.loss_scale, "comes before the loss scale is taken off")
        self.clipped = True
        self.use_all_gradients()

    def do_finite(self, instruction: Instruction) -> None:
        self.require(self.program.loss_scale, "the program has no loss scale")
        self.require(not self.unscaled, "is done a second time")
        self.unscaled = True
        self.use_all_gradients()

    def use_all_gradients(self) -> None:
        """All ranks read all gradients: they must be final, and nothing may have been stepped with them."""
        for state in self.trained():
            self.require(not state.outstanding, f"{state.bucket.name}: {state.outstanding}")
            self.require(not state.stepped, f"{state.bucket.name} has been stepped already")
            state.final = True

    def do_step(self, instruction: Instruction) -> None:
        if state := self.bucket(instruction):
            self.require(state.bucket.trained and self.program.optimizer, f"{state.bucket.name} is not trained")
            self.require(not state.stepped, f"{state.bucket.name} has been stepped already")
            self.require(not state.outstanding, f"{state.bucket.name}: {state.outstanding}")
            self.require(self.clipped or not self.program.clip, "comes before the clip")
            self.require(self.unscaled or not self.program.loss_scale, "comes before the loss scale is taken off")
            if state.bucket.offload in ("optimizer", "all"):
                self.require(state.unloaded == HERE, f"the gradients of {state.bucket.name} are not on the host")
            elif state.bucket.offload == "params":
                self.require(state.loaded == HERE, f"{state.bucket.name} is not loaded from the host")
            state.stepped = state.final = True

    def do_update(self, instruction: Instruction) -> None:
        for buffer in self.program.buffers:
            if buffer.update is not None and buffer.stage == self.stage:
                micros = range(self.program.microbatches) if buffer.average else (self.program.microbatches - 1,)
                for micro in micros:
                    self.read_slot(buffer.update, micro)

    def do_report(self, instruction: Instruction) -> None:
        self.reported = True

    def trained(self) -> Iterator[_BucketState]:
        return (state for state in self.buckets.values() if state.bucket.trained)

    def end(self) -> None:
        """What must have happened by the end of a step."""
        self.require(self.reported, "there is no report")
        for started, index in self.pending.items():
            self.fault(f"nothing waits for `{started}` of line {index + 1}")
        for slot, micro in self.gradients:
            self.fault(f"the gradient of {slot} @{micro} is never used")
        for call in self.calls.values():
            for micro in range(self.program.microbatches):
                self.completed(call, micro)
        for state in self.trained():
            if self.program.optimizer:
                self.require(state.stepped, f"{state.bucket.name} is never stepped")
            else:
                self.require(not state.outstanding, f"{state.bucket.name}: {state.outstanding}")

    def completed(self, call: Call, micro: int) -> None:
        """A call's forward, and its backward if it has one, whole or in parts."""
        needed = ["forward"]
        parts = self.codes[call.kind].parts
        if call.gradients:
            split = ("backward_input", call.name, micro) in self.done
            needed.append("backward_input" if split else "backward")
            if split and parts["backward_weight"].wanted:
                needed.append("backward_weight")
        for op in needed:
            self.require((op, call.name, micro) in self.done, f"there is no `{op} {call.name} @{micro}`")
