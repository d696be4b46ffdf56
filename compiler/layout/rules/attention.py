"""Attention."""

from __future__ import annotations

from compiler.ir.graph import Node, Value
from compiler.layout.rule import Method, Rule, rule
from compiler.layout.rules.signature import arguments, by_name

BOTH = ("s", "t")
METHODS = {"gather": Method(BOTH, ("s",)), "ring": Method(BOTH, BOTH), "ulysses": Method(BOTH, ("h",), back="s")}
"""What an axis that cuts the sequence of queries and of keys is to do instead:

gather   queries stay cut, all ranks get all keys
ring     both stay cut, and the operator passes the keys round
ulysses  the heads are cut instead, and every rank has the whole sequence for some of them (all-to-all, and back)
"""


@rule("planc.attention")
def attention(node: Node) -> Rule:
    """Samples, heads and queries are independent; the keys' sequence and the width of a head are whole.

    Query heads are groups of those that share a key/value head: cut along `h`, a rank has all of a group; cut along
    `g`, it has some of every group, and all keys and values. A mask and the documents are wanted for all keys.
    """
    given = arguments(node)
    query, key, mask = given["query"], given["key"], given["mask"]
    heads = "(h g)" if len(query.shape) > 2 else ""
    shared = "h" if heads else ""
    operands = {
        "query": f"... {heads} s d",
        "key": f"... {shared} t d",
        "value": f"... {shared} t e",
        "documents": "... w",
    }
    if isinstance(mask, Value):
        operands["mask"] = f"... {heads} s u" if len(mask.shape) > 2 else "s u"
    sizes = {"h": key.shape[-3], "g": query.shape[-3] // key.shape[-3]} if heads else None
    methods = METHODS if heads else {}
    return by_name(node, operands, f"... {heads} s e", sizes=sizes, fixed=frozenset("tudew"), methods=methods)
