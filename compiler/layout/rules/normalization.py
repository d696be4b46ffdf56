"""Normalisations: what is normalised over must be whole, all else may be cut."""

from __future__ import annotations

from typing import Any

from compiler.ir.graph import Node
from compiler.layout.rule import LocalShapes, Rule, einsum, rule
from compiler.layout.rules.signature import arguments, by_name, positions, with_arguments
from compiler.layout.rules.views import along


@rule("aten.layer_norm.default", "aten.rms_norm.default", "aten.native_layer_norm.default")
def over_last_dimensions(node: Node) -> Rule:
    """The native form also answers mean and reciprocal deviation, with dimensions of size 1."""
    count = len(arguments(node)["normalized_shape"])
    names = [f"n{k}" for k in range(count)]
    last = " ".join(names)
    statistics = " ".join(["...", *["1"] * count])
    result = ", ".join([f"... {last}", statistics, statistics][: len(node.outputs)])
    return by_name(
        node, {"input": f"... {last}", "weight": last, "bias": last}, result, fixed=frozenset(names)
    )


@rule("aten.group_norm.default")
def group_norm(node: Node) -> Rule:
    given = arguments(node)
    rank = len(given["input"].shape)
    space = " ".join(f"x{k}" for k in range(rank - 2))
    return by_name(
        node,
        {"input": f"b (g c) {space}", "weight": "(g c)", "bias": "(g c)"},
        f"b (g c) {space}",
        sizes={"g": given["num_groups"]},
        fixed=frozenset({"c", *space.split()}),
        localize=local_group_norm,
    )


def local_group_norm(node: Node, shapes: LocalShapes) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """As many groups as the local channels make."""
    given = arguments(node)
    value = given["input"]
    return with_arguments(node, num_groups=given["num_groups"] * shapes(value)[1] // value.shape[1])


@rule("aten.batch_norm.default", "planc.batch_norm")
def batch_norm(node: Node) -> Rule:
    """With the running statistics alone it is pointwise; in training, it is lowered before layouts are chosen."""
    names, space = _by_channel(node)
    fixed = frozenset({"b", *space}) if arguments(node)["training"] else frozenset()
    return by_name(node, names, f"{names['input']}, c, c", fixed=fixed)


@rule("aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit.no_stats")
def local_batch_norm(node: Node) -> Rule:
    """Where it was asked for (`local_statistics`): each part of the batch is normalised by itself. The new running
    statistics of a part are a term of their average over the parts."""
    names, space = _by_channel(node)
    result = f"{names['input']}, c, c, c, c"
    return by_name(node, names, result, fixed=frozenset(space), reduces={"b": "avg"})


def _by_channel(node: Node) -> tuple[dict[str, str], list[str]]:
    """The dimensions of each argument, and those of space."""
    space = [f"x{k}" for k in range(len(node.inputs[0].shape) - 2)]
    channel = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), "c")
    return {"input": " ".join(["b", "c", *space]), **channel}, space


@rule("aten.softmax.int", "aten._softmax.default", "aten.log_softmax.int", "aten._log_softmax.default")
def softmax(node: Node) -> Rule:
    """Where the dimension is cut, the operator exchanges maxima and sums of exponentials."""
    rank = len(node.inputs[0].shape)
    names = [f"d{k}" for k in range(rank)]
    over = frozenset(f"d{k}" for k in positions(arguments(node)["dim"], rank))
    return einsum(node, f"{' '.join(names)} -> {' '.join(names)}", collective=over)


@rule("aten._safe_softmax.default")
def safe_softmax(node: Node) -> Rule:
    return along(node, arguments(node)["dim"])


@rule("aten.cosine_similarity.default", "aten.pairwise_distance.default")
def along_features(node: Node) -> Rule:
    """Two operands that broadcast, reduced along `dim` of what they broadcast to."""
    rank = max(len(value.shape) for value in node.inputs)
    dim = arguments(node).get("dim", -1) % rank
    names = [f"d{k}" for k in range(rank)]
    sides = ", ".join(" ".join(names[rank - len(value.shape) :]) for value in node.inputs)
    kept = " ".join(name for k, name in enumerate(names) if k != dim)
    if arguments(node).get("keepdim"):
        kept = " ".join("1" if k == dim else name for k, name in enumerate(names))
    return einsum(node, f"{sides} -> {kept}", fixed=frozenset({f"d{dim}"}))
