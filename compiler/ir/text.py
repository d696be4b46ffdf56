"""The printed form of a graph, and its parser. `parse(print(graph))` prints the same again.

    graph layers.0 {
      input %x : float32[8, 64, 32] {dp: S(0)}  # kind=slot differentiable
      input %wq : float32[32, 32] {dp: V}       # kind=param differentiable name="layers.0.attn.wq.weight"
      %linear : float32[8, 64, 32] {dp: S(0)} = aten.linear.default(%x, %wq)  # layers.0.attn.wq @ llama.py:40
      output loss = %linear
    }
"""

from __future__ import annotations

import ast
import re
from typing import Any

from compiler.ir.graph import Graph, Node, Origin, Value
from compiler.layout.placement import Layout, parse_placement


def format_type(value: Value) -> str:
    """`float32[8, 64] {dp: S(0)}`; the layout is left out before the layout stage."""
    shape = ", ".join(map(str, value.shape))
    layout = f" {value.layout}" if value.layout is not None else ""
    return f"{value.dtype}[{shape}]{layout}"


def format_argument(argument: Any) -> str:
    if isinstance(argument, Value):
        return f"%{argument.name}"
    if isinstance(argument, (tuple, list)):
        return "[" + ", ".join(format_argument(item) for item in argument) + "]"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{key!r}: {format_argument(item)}" for key, item in argument.items()) + "}"
    return repr(argument)


def format_node(node: Node, origins: bool = True) -> str:
    results = ", ".join("_" if out is None else f"%{out.name} : {format_type(out)}" for out in node.outputs)
    arguments = [format_argument(item) for item in node.args]
    arguments += [f"{key}={format_argument(item)}" for key, item in node.kwargs.items()]
    text = f"{results} = {node.op}({', '.join(arguments)})"
    if origins and (node.origin.module or node.origin.source):
        text += f"  # {node.origin.module} @ {node.origin.source}"
    return text


def format_input(value: Value) -> str:
    notes = f"kind={value.kind}" + (" differentiable" if value.differentiable else "")
    return f"input %{value.name} : {format_type(value)}  # {notes}"


def print_graph(graph: Graph, origins: bool = True) -> str:
    """The whole graph as text (see the module's docstring)."""
    lines = [f"graph {graph.name} {{"]
    lines += [f"  {format_input(value)}" for value in graph.inputs]
    lines += [f"  {format_node(node, origins)}" for node in graph.nodes]
    lines += [f"  output {role} = %{value.name}" for role, value in graph.outputs.items()]
    return "\n".join(lines) + "\n}\n"


class ParseError(ValueError):
    """The text is no printed graph; the message names the line."""


def parse_graph(text: str) -> Graph:
    """The graph that `print_graph` printed."""
    lines = text.strip().splitlines()
    header = re.fullmatch(r"graph (.*) \{", lines[0]) if lines else None
    if header is None or lines[-1] != "}":
        raise ParseError("line 1: expected 'graph NAME {' and a closing '}'")
    graph = Graph(header[1])
    values: dict[str, Value] = {}
    for number, line in enumerate(lines[1:-1], start=2):
        try:
            _parse_line(line.strip(), graph, values)
        except (ValueError, KeyError, SyntaxError) as error:
            raise ParseError(f"line {number}: {error}: {line.strip()}") from error
    return graph


_TYPED = re.compile(r"%(?P<name>[^\s:,]+) : (?P<dtype>\w+)\[(?P<shape>[\d, ]*)\](?P<layout> \{[^{}]*\})?")


def _parse_value(match: re.Match[str], values: dict[str, Value]) -> Value:
    shape = tuple(int(size) for size in match["shape"].split(",") if size.strip())
    layout = None
    if match["layout"] is not None:
        body = match["layout"].strip()[1:-1]
        items = re.findall(r"(\w+): ([A-Z](?:\([^)]*\))?)", body)
        layout = Layout((axis, parse_placement(place)) for axis, place in items)
    value = Value(match["name"], match["dtype"], shape, layout=layout)
    values[value.name] = value
    return value


def _parse_line(line: str, graph: Graph, values: dict[str, Value]) -> None:
    body, _, comment = line.partition("  # ")
    if body.startswith("input "):
        match = _TYPED.fullmatch(body.removeprefix("input "))
        if match is None:
            raise ValueError("not an input")
        value = _parse_value(match, values)
        words = comment.split()
        value.kind = words[0].removeprefix("kind=")
        value.differentiable = "differentiable" in words
        graph.inputs.append(value)
    elif body.startswith("output "):
        role, _, name = body.removeprefix("output ").partition(" = %")
        graph.outputs[role] = values[name]
    else:
        results, _, call = body.partition(" = ")
        module, _, source = comment.partition(" @ ")
        match = re.fullmatch(r"([\w.:]+)\((.*)\)", call)
        if match is None:
            raise ValueError("not a node")
        args, kwargs = _parse_arguments(match[2], values)
        node = Node(match[1], args, kwargs, [], Origin(module, source))
        for piece in re.finditer(rf"_(?=, |$)|{_TYPED.pattern}", results):
            out = None if piece[0] == "_" else _parse_value(piece, values)
            if out is not None:
                out.producer = node
            node.outputs.append(out)
        graph.nodes.append(node)


def _parse_arguments(text: str, values: dict[str, Value]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments are Python literals in which `%name` stands for a value."""
    names: list[str] = []

    def stand_in(match: re.Match[str]) -> str:
        names.append(match[1])
        return f"_value_{len(names) - 1}"

    def literal(tree: ast.expr) -> Any:
        if isinstance(tree, ast.Name) and tree.id.startswith("_value_"):
            return values[names[int(tree.id.removeprefix("_value_"))]]
        if isinstance(tree, ast.Name) and tree.id in ("inf", "nan"):
            return float(tree.id)
        if isinstance(tree, (ast.List, ast.Tuple)):
            return tuple(literal(item) for item in tree.elts)
        if isinstance(tree, ast.Dict):
            return {ast.literal_eval(key): literal(item) for key, item in zip(tree.keys, tree.values)}
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.operand, ast.Name):
            return -literal(tree.operand)
        return ast.literal_eval(tree)

    quoted = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|%([\w.:@]+)")
    source = quoted.sub(lambda match: stand_in(match) if match[1] else match[0], text)
    call = ast.parse(f"f({source})", mode="eval").body
    assert isinstance(call, ast.Call)
    return tuple(literal(item) for item in call.args), {k.arg: literal(k.value) for k in call.keywords if k.arg}
