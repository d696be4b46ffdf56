"""Readable Python for a segment's local code."""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
import torch

from compiler.autodiff.partition import SegmentCode
from compiler.autodiff.weight_split import SplitBackward
from compiler.ir.graph import Node, Value
from compiler.ir.text import format_type

_TEMPLATE = jinja2.Environment(
    trim_blocks=False, lstrip_blocks=False, keep_trailing_newline=True, autoescape=False
).from_string((files("compiler.emit") / "templates" / "segment.py.j2").read_text())

RESERVED = {
    "ctx", "torch", "aten", "forward", "backward", "backward_input", "backward_weight", "NEEDED", "GIVEN", "WANTED",
    "NEEDED_INPUT", "WANTED_INPUT", "NEEDED_WEIGHT", "WANTED_WEIGHT", "given",
}  # fmt: skip


def segment_source(name: str, code: SegmentCode, used_by: list[str], split: SplitBackward | None = None) -> str:
    """The file for one distinct segment; with `split`, its backward is there in two parts too."""
    writer = _Writer(code)
    arguments = [writer.name(value) for value in code.arguments]
    forward = writer.lines(code.forward, keep=[*code.results, *code.saved, *code.arguments])
    results, saved = writer.tuple(code.results), writer.tuple(code.saved)
    backwards = [_whole(writer, code)] if code.wanted else []
    if backwards and split is not None:
        backwards += [_input_part(writer, code, split), _weight_part(writer, code, split)]
    calls = ", ".join(used_by[:6]) + (f" and {len(used_by) - 6} more" if len(used_by) > 6 else "")
    return _TEMPLATE.render(
        title=f"Segment {name}.",
        used_by=calls,
        needed=tuple(code.needed),
        given=tuple(code.given),
        wanted=tuple(code.wanted),
        operators=writer.operators(),
        arguments=arguments,
        forward=forward,
        results=results,
        saved=saved,
        backwards=backwards,
    )


@dataclass(frozen=True)
class _Backward:
    """The backward or a part of it, as text. It gets its `arguments` in one list, which it empties."""

    name: str
    needed: tuple[int, ...]
    wanted: tuple[int, ...]
    arguments: str
    lines: list[str]
    returns: str

    @property
    def suffix(self) -> str:
        return self.name.removeprefix("backward_").upper()


def _whole(writer: _Writer, code: SegmentCode) -> _Backward:
    passed = [code.arguments[k] for k in code.needed] + code.saved + code.cotangents
    lines = writer.lines(code.backward, keep=code.gradients, release=passed)
    returns = writer.tuple(code.gradients)
    return _Backward("backward", tuple(code.needed), tuple(code.wanted), writer.targets_of(passed), lines, returns)


def _input_part(writer: _Writer, code: SegmentCode, split: SplitBackward) -> _Backward:
    part = split.input
    passed = [code.arguments[k] for k in part.needed] + code.saved + code.cotangents
    lines = writer.lines(part.nodes, keep=[*part.gradients, *split.kept], release=passed)
    returns = f"{writer.tuple(part.gradients)}, {writer.tuple(split.kept)}"
    needed, wanted = tuple(part.needed), tuple(part.wanted)
    return _Backward("backward_input", needed, wanted, writer.targets_of(passed), lines, returns)


def _weight_part(writer: _Writer, code: SegmentCode, split: SplitBackward) -> _Backward:
    part = split.weight
    passed = [code.arguments[k] for k in part.needed] + split.kept
    lines = writer.lines(part.nodes, keep=part.gradients, release=passed)
    needed, wanted, returns = tuple(part.needed), tuple(part.wanted), writer.tuple(part.gradients)
    return _Backward("backward_weight", needed, wanted, writer.targets_of(passed), lines, returns)


@cache
def returns_list(op: str) -> bool:
    """Whether an operator returns a list of tensors, however many."""
    if op.startswith("planc."):
        return op == "planc.opaque_backward"
    namespace, packet, overload = op.split(".")
    returns = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "List[Tensor]"


class _Writer:
    """Names and lines for one file."""

    def __init__(self, code: SegmentCode):
        self.code = code
        self.names: dict[Value, str] = {}
        self.taken: set[str] = set(RESERVED)
        self.targets: dict[str, str] = {}

    def name(self, value: Value) -> str:
        if value not in self.names:
            base = "".join(c if c.isalnum() or c == "_" else "_" for c in value.name)
            if not base[0].isalpha() and base[0] != "_" or keyword.iskeyword(base):
                base = f"v_{base}"
            name, k = base, 1
            while name in self.taken:
                name, k = f"{base}_{k}", k + 1
            self.taken.add(name)
            self.names[value] = name
        return self.names[value]

    def tuple(self, values: Iterable[Value]) -> str:
        names = [self.name(value) for value in values]
        return f"({', '.join(names)}{',' if len(names) == 1 else ''})"

    def targets_of(self, values: Iterable[Value]) -> str:
        """What takes the values out of a list: "x, w", or "x," for one."""
        names = [self.name(value) for value in values]
        return f"{names[0]}," if len(names) == 1 else ", ".join(names)

    def operators(self) -> list[tuple[str, str]]:
        return [(name, f"torch.ops.{target}") for target, name in self.targets.items()]

    def lines(self, nodes: list[Node], keep: Iterable[Value], release: Iterable[Value] = ()) -> list[str]:
        """Assignments, a comment where the model's line changes, and `del` behind the last use of a value."""
        kept = set(keep)
        last: dict[Value, int] = {}
        own = set(release) | {out for node in nodes for out in node.outputs if out is not None}
        for k, node in enumerate(nodes):
            last.update((value, k) for value in node.inputs if value in own and value not in kept)
        lines, place = [], ""
        for k, node in enumerate(nodes):
            where = self.place(node)
            if where != place:
                lines.append(f"# {where}" if where else "#")
                place = where
            lines.append(self.assignment(node))
            dead = [self.name(value) for value in dict.fromkeys(node.inputs) if last.get(value) == k]
            if dead:
                lines.append(f"del {', '.join(dead)}")
        return lines

    def place(self, node: Node) -> str:
        origin = node.origin
        parts = [part for part in (origin.module, origin.source, origin.code) if part]
        return "  ".join(parts)

    def assignment(self, node: Node) -> str:
        targets = ", ".join("_" if out is None else self.name(out) for out in node.outputs)
        if len(node.outputs) == 1 and returns_list(node.op):
            targets += ","
        comment = ", ".join(self.type(out) for out in node.outputs if out is not None)
        return f"{targets} = {self.call(node)}  # {comment}"

    def type(self, value: Value) -> str:
        meaning = self.code.meaning.get(value)
        if value.kind == "work":
            return f"under way: {format_type(value)}"
        return format_type(meaning if meaning is not None else value)

    def call(self, node: Node) -> str:
        arguments = [self.argument(item) for item in node.args]
        arguments += [
            f"{key}=ctx.device" if item == "device" else f"{key}={self.argument(item)}"
            for key, item in node.kwargs.items()
            if item is not None
        ]
        return f"{self.function(node.op)}({', '.join(arguments)})"

    def function(self, op: str) -> str:
        # The strides of an operand are those of whatever kernel the device has, so a view may have to copy.
        op = "aten.reshape.default" if op in ("aten.view.default", "aten._unsafe_view.default") else op
        if op.startswith("planc."):
            return f"ctx.{op.removeprefix('planc.')}"
        if op not in self.targets:
            _, packet, overload = op.split(".")
            packet = packet.lstrip("_") if packet.lstrip("_") not in self.targets.values() else packet
            name = packet if packet not in self.targets.values() else f"{packet}_{overload}"
            if keyword.iskeyword(name):
                name += "_"
            while name in self.targets.values():
                name += "_"
            self.targets[op] = name
        return f"aten.{self.targets[op]}"

    def argument(self, item: Any) -> str:
        if isinstance(item, Value):
            return self.name(item)
        if isinstance(item, tuple):
            inner = ", ".join(self.argument(part) for part in item)
            return f"({inner}{',' if len(item) == 1 else ''})"
        if isinstance(item, str) and item.startswith("torch."):
            return item
        if item == "device":
            return "ctx.device"
        if isinstance(item, float) and (item != item or item in (float("inf"), float("-inf"))):
            return f'float("{item}")'
        return repr(item)
