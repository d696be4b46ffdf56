"""Equal segments: a segment's graph with neutral names, and its text as the key under which it is compiled once."""

from __future__ import annotations

from compiler.ir.graph import Graph, Node, Origin, Value, map_values
from compiler.ir.text import print_graph
from compiler.segments.split import Segment

SITED = {"planc.dropout": 2, "planc.attention": 7}
"""Operators with a random site among their arguments, and where it stands."""


def canonical(segment: Segment) -> Graph:
    """A copy whose values are named by position. Random sites count from the segment's first."""
    graph = Graph(segment.unit or segment.name)
    env: dict[Value, Value] = {}
    base = first_site(segment)
    for value in segment.inputs:
        # What an input is elsewhere (a batch input, another segment's result) makes no difference here.
        kind = value.kind if value.kind == "param" else "slot"
        new = Value(_short(value, env), value.dtype, value.shape, kind, value.differentiable, value.layout)
        env[value] = new
        graph.inputs.append(new)
    for node in segment.nodes:
        args, kwargs = map_values((node.args, node.kwargs), env.__getitem__)
        if node.op in SITED:
            at = SITED[node.op]
            args = (*args[:at], args[at] - base if args[at] is not None else None, *args[at + 1 :])
        copy = Node(node.op, args, kwargs, [], any_element(node.origin, segment.unit))
        for out in node.outputs:
            if out is None:
                copy.outputs.append(None)
                continue
            new = Value(_short(out, env), out.dtype, out.shape, "", out.differentiable, out.layout, copy)
            env[out] = new
            copy.outputs.append(new)
        graph.nodes.append(copy)
    graph.outputs = {f"out{k}": env[value] for k, value in enumerate(segment.outputs)}
    return graph


def any_element(origin: Origin, unit: str) -> Origin:
    """The origin for all elements of a list: "layers.*.attn" for "layers.3.attn"."""
    head, _, last = unit.rpartition(".")
    inside = origin.module == unit or origin.module.startswith(f"{unit}.")
    if not (inside and last.isdigit()):
        return origin
    return Origin(f"{head}.*{origin.module[len(unit):]}", origin.source, origin.code)


def first_site(segment: Segment) -> int:
    """The smallest random site in the segment (0 if it has none)."""
    sites = [node.args[SITED[node.op]] for node in segment.nodes if node.op in SITED]
    return min((site for site in sites if site is not None), default=0)


def key(graph: Graph) -> str:
    """Equal for segments that compute the same from the same types: the text with names that only count."""
    names = {value: f"v{k}" for k, value in enumerate(graph.values())}
    before = {value: value.name for value in names}
    for value, name in names.items():
        value.name = name
    text = print_graph(graph, origins=False).split("\n", 1)[1]
    for value, name in before.items():
        value.name = name
    return text


def _short(value: Value, env: dict[Value, Value]) -> str:
    """A readable name without the path: "wq_weight" for a parameter "layers.3.attn.wq.weight"."""
    parts = [part for part in value.name.split(".") if not part.isdigit()]
    base = "_".join(parts[-2:] if value.kind in ("param", "buffer") else parts[:1]) or "v"
    base = "".join(c if c.isalnum() else "_" for c in base)
    base = base if base[0].isalpha() or base[0] == "_" else f"v_{base}"
    taken = {v.name for v in env.values()}
    name, k = base, 1
    while name in taken:
        name, k = f"{base}_{k}", k + 1
    return name
