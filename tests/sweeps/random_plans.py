"""Random plans: any model of the zoo, any mesh of up to 16 ranks, any strategies together, any options."""

from __future__ import annotations

import math
from random import Random

from tests.sweeps.grid import ATTENTIVE, FLAT, MODELS, deep, strategy
from tests.zoo import plan_text

AXES = {"pp": (1, 1, 2, 2, 3, 4), "dp": (1, 2, 2, 3, 4), "cp": (1, 1, 2, 2, 3), "tp": (1, 1, 2, 2, 3, 4)}
RANKS = 16
OPTIMIZERS = (
    "optimizer adamw { lr = 1e-3, weight_decay = 0.1 }",
    'optimizer adamw { lr = 1e-2, weight_decay = 0.5, no_decay "*.bias", schedule = cosine, warmup = 2, total = 5 }',
    "optimizer sgd { lr = 1e-2, momentum = 0.9, nesterov = on }",
    "optimizer sgd { lr = 1e-2, weight_decay = 0.1 }",
)


def random_plan(seed: int) -> str:
    """The text of the plan with this number."""
    draw = Random(seed)
    name = draw.choice(ATTENTIVE if draw.random() < 0.7 else MODELS)
    sizes = random_mesh(draw, context=name in ATTENTIVE)
    mesh = list(sizes)
    if draw.random() < 0.3:
        draw.shuffle(mesh)
    sizes = {axis: sizes[axis] for axis in mesh}
    statements = [*zero(draw, sizes), *tensor(draw, sizes), *context(draw, sizes), *pipeline(draw, sizes), *rest(draw)]
    if name in FLAT and "pp" in sizes:
        statements.append('segment "*"')
    batch, parts = draw.choice((1, 4, 7, 8, 8, 12, 16)), 1
    if sizes.get("dp", 1) > 1 and "pp" not in sizes:
        parts = draw.choice((1, 1, 2, 3))
    entry = deep(name, draw.choice((1, 2, 3, 4)))
    shown = " ".join(f"{axis}={size}" for axis, size in sizes.items())
    return plan_text(entry, batch, shown, parts, "\n".join(statements), draw.choice(OPTIMIZERS))


def random_mesh(draw: Random, context: bool) -> dict[str, int]:
    while True:
        sizes = {axis: draw.choice(choices) for axis, choices in AXES.items() if axis != "cp" or context}
        if 1 < math.prod(sizes.values()) <= RANKS:
            return {axis: size for axis, size in sizes.items() if size > 1 or axis == "dp"}


def zero(draw: Random, sizes: dict[str, int]) -> list[str]:
    axes = [axis for axis in ("dp", "cp") if sizes.get(axis, 1) > 1]
    if not axes or draw.random() < 0.3:
        return []
    over = draw.choice([axes, axes[:1]])
    stage = draw.choice((1, 2, 3))
    options: dict[str, object] = {"stage": stage, "bucket": draw.choice(("256B", "2KB", "1MB"))}
    if stage == 3:
        options |= {"prefetch": draw.choice((0, 1, 3)), "gather": draw.choice(("use", "step"))}
        options |= {
            "persist_below": draw.choice((0, 20, 300)),
            "offload": draw.choice(("none", "none", "params", "all")),
        }
    elif stage == 2:
        options |= {"accumulate": draw.choice(("local", "scatter"))}
    else:
        options |= {"offload": draw.choice(("none", "optimizer"))}
    ways = math.prod(sizes[axis] for axis in over)
    if ways == 4 and draw.random() < 0.5:
        options["hybrid"] = 2
    return [strategy(f"zero over {', '.join(over)}", **options)]


def tensor(draw: Random, sizes: dict[str, int]) -> list[str]:
    if "tp" not in sizes:
        return []
    switch = ("on", "off")
    return [strategy("tensor over tp", style="auto", sequence=draw.choice(switch), overlap=draw.choice(switch))]


def context(draw: Random, sizes: dict[str, int]) -> list[str]:
    if "cp" not in sizes:
        return []
    kind, order = draw.choice(("gather", "ring", "ulysses")), draw.choice(("zigzag", "contiguous"))
    return [strategy("context over cp", attention=kind, order=order)]


def pipeline(draw: Random, sizes: dict[str, int]) -> list[str]:
    if "pp" not in sizes:
        return []
    schedule = draw.choice(("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v", "auto"))
    options: dict[str, object] = {"schedule": schedule, "microbatches": draw.choice((1, 2, 3, 4, 8))}
    if draw.random() < 0.2:
        options["split"] = "equal"
    if "tp" in sizes and draw.random() < 0.4:
        options["scatter_gather"] = "on"
    return [strategy("pipeline over pp", **options)]


def rest(draw: Random) -> list[str]:
    """What changes no layout."""
    recompute = draw.choice(("", "", 'recompute "*" = full', 'recompute "*" = selective'))
    clip = draw.choice(("", "clip grad_norm = 0.5", "clip grad_value = 0.01"))
    return [statement for statement in (recompute, clip) if statement]
