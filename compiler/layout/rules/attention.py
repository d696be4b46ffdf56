"""Attention."""

from __future__ import annotations

from compiler.ir.graph import Node, Value
from compiler.layout.rule import Rule, rule
from compiler.layout.rules.signature import arguments, by_name


@rule("planc.attention")
def attention(node: Node) -> Rule:
    """Samples and heads are independent; the sequences and the width of a head are whole.

    Query heads are groups of those that share a key/value head: cut along `h`, a rank has all of a group; cut along
    `g`, it has some of every group, and all keys and values.
    """
    given = arguments(node)
    query, key, mask = given["query"], given["key"], given["mask"]
    heads = "(h g)" if len(query.shape) > 2 else ""
    shared = "h" if heads else ""
    operands = {"query": f"... {heads} s d", "key": f"... {shared} t d", "value": f"... {shared} t e"}
    if isinstance(mask, Value):
        operands["mask"] = f"... {heads} s t" if len(mask.shape) > 2 else "s t"
    sizes = {"h": key.shape[-3], "g": query.shape[-3] // key.shape[-3]} if heads else None
    return by_name(node, operands, f"... {heads} s e", sizes=sizes, fixed=frozenset("stde"))
