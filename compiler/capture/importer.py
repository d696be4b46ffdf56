"""From an exported program to planc's graph, operator by operator, nothing rewritten.

    before:  %unbind : call_function[aten.unbind.int](%permute)      %getitem : call_function[getitem](%unbind, 0)
    after:   %unbind : float32[…], _, _ = aten.unbind.int(%permute)

Regions under `torch.no_grad()` are inlined: `compiler.capture.tracing` has detached what they make.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from compiler.capture.failures import Unsupported
from compiler.capture.opaque import OPERATOR
from compiler.capture.origins import Origins
from compiler.ir.graph import Graph, Node, Origin, Value

IGNORED_OPS = ("aten._assert_", "aten.sym_constrain_range", "aten._functional_assert", "aten._functional_sym_constrain")
KINDS = {InputKind.PARAMETER: "param", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "constant"}


@dataclass
class Imported:
    """The graph as exported. `outputs` of the graph are by role; `constants` name → tensor (maybe fake)."""

    graph: Graph
    constants: dict[str, Tensor] = field(default_factory=dict)


def import_program(
    program: ExportedProgram, input_names: list[str], roles: list[str], canonical: Mapping[str, str],
    trainable: Callable[[str], bool], origins: Origins,
) -> Imported:  # fmt: skip
    """The program's graph. `canonical` maps every parameter and buffer name to the one it goes by."""
    return _Importer(program, input_names, roles, canonical, trainable, origins).run()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Names:
    """Short names that are used once: "linear", "linear_1", …"""

    def __init__(self, taken: set[str]):
        self.taken = set(taken)
        self.counts: dict[str, int] = {}

    def __call__(self, base: str) -> str:
        while True:
            count = self.counts.get(base, 0)
            self.counts[base] = count + 1
            name = base if count == 0 else f"{base}_{count}"
            if name not in self.taken:
                self.taken.add(name)
                return name


class _Importer:
    def __init__(self, program, input_names, roles, canonical, trainable, origins):  # type: ignore[no-untyped-def]
        self.program: ExportedProgram = program
        self.input_names, self.roles, self.canonical = list(input_names), list(roles), canonical
        self.trainable, self.origins = trainable, origins
        self.graph = Graph("model")
        self.constants: dict[str, Tensor] = {}
        self.env: dict[fx.Node, Any] = {}
        self.by_name: dict[str, Value] = {}
        self.names = Names(set())

    def run(self) -> Imported:
        self.inputs()
        self.names = Names({value.name for value in self.graph.inputs})
        results = self.body(self.program.graph_module, self.env)
        self.outputs(results)
        return Imported(self.graph, self.constants)

    # -- the signature -------------------------------------------------------------------------------------------

    def inputs(self) -> None:
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        order = iter(self.input_names)
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            spec = specs[node.name]
            if spec.kind is InputKind.USER_INPUT:
                self.env[node] = self.add_input(next(order), "batch", node.meta["val"], False)
            elif spec.kind in KINDS:
                self.env[node] = self.held(node, spec)
            else:
                raise Unsupported(f"the model holds an object that cannot be captured: {spec.target}", Origin())

    def held(self, node: fx.Node, spec: Any) -> Value:
        """A parameter, a buffer or a constant; the same one is one input."""
        target = spec.target.removeprefix(f"{self.origins.prefix}.")
        kind = KINDS[spec.kind]
        name = self.canonical.get(target)
        if name is None:
            kind = "constant"
            name = target.replace("lifted_tensor_", "constant_")
            self.constants[name] = self.program.constants[spec.target]
        if name in self.by_name:
            return self.by_name[name]
        tensor = node.meta["val"]
        learns = kind == "param" and tensor.requires_grad and self.trainable(name)
        return self.add_input(name, kind, tensor, learns)

    def add_input(self, name: str, kind: str, tensor: Tensor, differentiable: bool) -> Value:
        value = Value(name, dtype_name(tensor.dtype), tuple(tensor.shape), kind, differentiable)
        self.graph.inputs.append(value)
        self.by_name[name] = value
        return value

    def outputs(self, results: tuple[Any, ...]) -> None:
        roles, mutated = iter(self.roles), {}
        for spec, value in zip(self.program.graph_signature.output_specs, results):
            if spec.kind is OutputKind.USER_OUTPUT:
                role = next(roles)
                assert isinstance(value, Value)
                self.graph.outputs[role] = value
            elif spec.kind is OutputKind.BUFFER_MUTATION:
                name = self.canonical[spec.target.removeprefix(f"{self.origins.prefix}.")]
                mutated[f"buffer:{name}"] = value
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                continue  # the caller's batch: nothing after the step reads it
            else:
                target = str(spec.target).removeprefix(f"{self.origins.prefix}.")
                raise Unsupported(f"the forward changes the parameter `{target}`", Origin(), "E124")
        self.graph.outputs |= mutated  # after the loss

    # -- nodes -----------------------------------------------------------------------------------------------------

    def body(self, module: fx.GraphModule, env: dict[fx.Node, Any]) -> tuple[Any, ...]:
        """Import the nodes of a graph; returns what it outputs."""
        origin = Origin()
        for node in module.graph.nodes:
            if node.op == "output":
                return tuple(self.argument(item, env) for item in node.args[0])
            if node.op == "call_function":
                origin = self.origins.of(node.meta, origin)
                self.call(module, node, env, origin)
            elif node.op == "get_attr":
                env[node] = getattr(module, node.target)
        raise AssertionError("a graph without an output")

    def call(self, module: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Any], origin: Origin) -> None:
        target = node.target
        if target is operator.getitem:
            source, index = node.args
            env[node] = env[source][index]
        elif isinstance(target, torch._ops.OpOverload):
            self.operator(node, env, origin)
        elif isinstance(target, torch._ops.HigherOrderOperator):
            self.region(module, node, env, origin)
        else:
            name = getattr(target, "__name__", str(target))
            raise Unsupported(f"`{name}` works on a size that is not fixed", origin, "E122")

    def operator(self, node: fx.Node, env: dict[fx.Node, Any], origin: Origin) -> None:
        name = operator_name(node.target)
        if name.startswith(IGNORED_OPS):
            env[node] = None
            return
        elif not name.startswith("aten.") and name != OPERATOR:
            raise Unsupported(f"`{name.rpartition('.')[0]}` is an operator of a library, which a program does not load", origin)
        meta = node.meta.get("val")
        if meta is None or isinstance(meta, (bool, int, float)):
            raise Unsupported(f"`{name}` gives no tensor", origin)
        several = isinstance(meta, (tuple, list))
        args, kwargs = self.argument((node.args, dict(node.kwargs)), env)
        if name == OPERATOR:
            name, args = "planc.opaque", (args[2], args[0], args[1], args[3])
        made = Node(name, args, kwargs, [], origin)
        learns = name != "aten.detach.default" and any(value.differentiable for value in made.inputs)
        used = {user.args[1] for user in node.users if user.target is operator.getitem}
        for k, tensor in enumerate(meta if several else (meta,)):
            if tensor is None or (several and k not in used):
                made.outputs.append(None)
                continue
            if tensor.layout is not torch.strided:
                raise Unsupported("a sparse tensor", origin)
            real = tensor.dtype.is_floating_point or tensor.dtype.is_complex
            value = Value(
                self.names(name.split(".")[1].strip("_")), dtype_name(tensor.dtype), tuple(map(int, tensor.shape)), "",
                learns and real, None, made,
            )  # fmt: skip
            made.outputs.append(value)
        self.graph.nodes.append(made)
        env[node] = made.outputs if several else made.outputs[0]

    def region(self, module: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Any], origin: Origin) -> None:
        """A call of a subgraph: inlined if it only switches gradients off."""
        name = str(node.target)
        if name != "wrap_with_set_grad_enabled":
            raise Unsupported(name, origin, "E123")
        _, body, *operands = node.args
        sub = env[body]
        places = (n for n in sub.graph.nodes if n.op == "placeholder")
        inner = dict(zip(places, (self.argument(item, env) for item in operands)))
        env[node] = self.body(sub, inner)

    def argument(self, item: Any, env: dict[fx.Node, Any]) -> Any:
        """Values for nodes; dtypes as strings; lists as tuples; devices and layouts stay for normalization to drop."""
        if isinstance(item, fx.Node):
            return env[item]
        if isinstance(item, (tuple, list)):
            return tuple(self.argument(x, env) for x in item)
        if isinstance(item, dict):
            return {key: self.argument(x, env) for key, x in item.items()}
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, complex):
            raise Unsupported("a complex number", Origin(), "E125")
        return str(item)  # dtype, device, layout, memory format


def operator_name(target: Any) -> str:
    """ "aten.linear.default" """
    namespace, _, rest = str(target).partition(".")
    return f"{namespace}.{rest}"
