"""The models that the tests run everything on: one registry, with inputs, batches and plan texts.

    for entry in ZOO:                      # or select(size="tiny", dropout=False)
        model = entry.build()              # on the current default device and dtype
        loss = loss_of(model(**entry.batch(8)))
        text = plan_text(entry, batch=8, mesh="dp=2", microbatches=2)
"""
from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100  # the label that counts for nothing
Batch = dict[str, Tensor]
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class ZooModel:
    """One model at one size.

    `inputs` maps each input's name to its dtype (as plans write it: `int64`, `bool`, `float32`) and its shape, in
    which "B" stands for the batch. Floating inputs and weights are made in torch's default dtype, whichever that is.
    """

    name: str
    factory: str  # "module:attribute", as plans write it
    options: dict[str, Any]
    inputs: dict[str, tuple[str, Shape]]
    make_batch: Callable[[int, int], Batch] = field(repr=False)
    size: str = "tiny"  # tiny | small
    traits: frozenset[str] = frozenset()  # of TRAITS
    plans: tuple[dict[str, Any], ...] = ()  # of a case: the meshes and options it was written for
    expect: str = "equal"  # equal | equal_or_diagnostic | diagnostic

    def build(self, seed: int = 0) -> nn.Module:
        """The model in training mode, with weights that depend on `seed` alone (cases seed themselves)."""
        torch.manual_seed(seed)
        return instantiate(self.factory, self.options).train()

    def batch(self, n: int, seed: int = 0) -> Batch:
        """`n` samples by input name. Cases have one batch each; another seed only rotates its samples."""
        return self.make_batch(n, seed)

    def shapes(self, n: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(n if dim == "B" else dim for dim in shape) for name, (_, shape) in self.inputs.items()}


# What a test may have to know about a model before it compares it with something.
TRAITS = {
    "dropout": "draws random numbers in its forward",
    "batchnorm": "mixes samples, and updates buffers in its forward",
    "frozen": "has parameters that need no gradient",
    "unused": "has parameters that the loss does not depend on",
    "tied": "uses one parameter in two places",
    "inplace": "changes tensors in place",
    "metrics": "returns more than the loss",
    "branch": "chooses its way by the data: cannot be captured",
}


def instantiate(factory: str, options: dict[str, Any]) -> nn.Module:
    """Call the factory `module:attribute`. An option `config` names a transformers configuration to build first."""
    module, path = factory.split(":")
    make = reduce(getattr, path.split("."), importlib.import_module(module))
    if "config" in options:
        rest = {key: value for key, value in options.items() if key != "config"}
        return make(getattr(importlib.import_module(module), options["config"])(**rest))
    return make(**options)


def loss_of(output: Any) -> Tensor:
    """The loss in what a forward returns: a tensor, a dict, or a transformers output."""
    return output if isinstance(output, Tensor) else output["loss"]


def select(size: str | None = None, **traits: bool) -> list[ZooModel]:
    """Entries of one size, with (`dropout=True`) or without (`branch=False`) the traits named."""
    unknown = traits.keys() - TRAITS.keys()
    assert not unknown, f"no such trait: {', '.join(sorted(unknown))}"
    return [
        entry
        for entry in ZOO
        if size in (None, entry.size) and all((trait in entry.traits) == want for trait, want in traits.items())
    ]


def get(name: str) -> ZooModel:
    return next(entry for entry in ZOO if entry.name == name)


# --- plan texts ---------------------------------------------------------------------------------------------------


def plan_text(
    entry: ZooModel,
    batch: int = 8,
    mesh: str = "dp=2",
    microbatches: int = 1,
    extra: str = "",
    optimizer: str = "optimizer adamw { lr = 1e-3, betas = (0.9, 0.95), weight_decay = 0.1 }",
) -> str:
    """A plan that trains `entry` on `mesh`, with data parallelism where the mesh has an axis `dp`.

    `extra` is appended as it is (more strategies, `precision`, `clip`, …). Sequence lengths that all inputs share are
    written as `seq`.
    """
    options = ", ".join(f"{key} = {literal(value)}" for key, value in entry.options.items())
    lengths = {shape[1] for _, shape in entry.inputs.values() if len(shape) == 2}
    one_length = len(lengths) == 1

    def shown(shape: Shape) -> str:
        named = ("batch" if dim == "B" else "seq" if one_length and len(shape) == 2 else str(dim) for dim in shape)
        return ", ".join(named)

    lines = [f'model "{entry.factory}"' + (f" {{ {options} }}" if options else "")]
    lines += [f"batch = {batch}"]
    lines += [f"seq = {next(iter(lengths))}"] if one_length else []
    lines += [f"input {name} : {dtype}[{shown(shape)}]" for name, (dtype, shape) in entry.inputs.items()]
    lines += [f"mesh {mesh}"]
    if any(axis.split("=")[0] == "dp" for axis in mesh.split()):
        lines += ["data over dp" + (f" {{ microbatches = {microbatches} }}" if microbatches > 1 else "")]
    elif microbatches > 1:
        raise ValueError(f"micro-batches are an option of `data over dp`, and mesh {mesh!r} has no dp")
    lines += [optimizer] if optimizer else []
    lines += [extra.strip("\n")] if extra else []
    return "\n".join(lines) + "\n"


def literal(value: Any) -> str:
    """A Python value as plans write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(literal, value)) + ")"
    return str(value)


# --- batches ------------------------------------------------------------------------------------------------------


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1 + seed)


def mask_unevenly(labels: Tensor) -> Tensor:
    """Leave a third, two thirds, all and none of the labels, from row to row."""
    n, seq = labels.shape
    kept = torch.tensor([(i + 1) % 4 * seq // 3 for i in range(n)])
    return labels.masked_fill(torch.arange(seq)[None] >= kept[:, None], IGNORED)


def token_batch(n: int, seed: int, *, vocab: int, seq: int, tokens: str = "tokens") -> Batch:
    """Random text and its next tokens, labelled unevenly."""
    text = torch.randint(0, vocab, (n, seq + 1), generator=generator(seed))
    return {tokens: text[:, :-1].clone(), "labels": mask_unevenly(text[:, 1:])}


def translation_batch(n: int, seed: int, *, vocab: int, source: int, target: int) -> Batch:
    """Sources padded with 0 after different lengths (never empty), and targets labelled unevenly."""
    g = generator(seed)
    texts = torch.randint(1, vocab, (n, source), generator=g)
    length = torch.tensor([source - i % source for i in range(n)])
    output = torch.randint(1, vocab, (n, target + 1), generator=g)
    return {
        "source": texts.masked_fill(torch.arange(source)[None] >= length[:, None], 0),
        "target": output[:, :-1].clone(),
        "labels": mask_unevenly(output[:, 1:]),
    }


def image_batch(n: int, seed: int, *, image: int, classes: int) -> Batch:
    """Noise whose mean and spread drift along the batch, so that a part has other statistics than the whole."""
    g = generator(seed)
    drift = torch.arange(n).view(n, 1, 1, 1) / n
    return {
        "images": torch.randn(n, 3, image, image, generator=g) * (1 + drift) + drift,
        "labels": torch.randint(0, classes, (n,), generator=g),
    }


def vector_batch(n: int, seed: int, *, dim: int, classes: int) -> Batch:
    g = generator(seed)
    return {"x": torch.randn(n, dim, generator=g), "labels": torch.randint(0, classes, (n,), generator=g)}


# --- the registry -------------------------------------------------------------------------------------------------


def own(
    name: str, size: str, attribute: str, options: dict[str, Any], make_batch: Callable[[int, int], Batch], *traits: str
) -> ZooModel:
    return ZooModel(
        f"{name}-{size}",
        f"dsl_examples.models.{attribute}",
        options,
        inputs_of(make_batch(2, 0)),
        make_batch,
        size,
        frozenset(traits),
    )


def inputs_of(batch: Batch) -> dict[str, tuple[str, Shape]]:
    def dtype(value: Tensor) -> str:
        return "float32" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")

    return {name: (dtype(value), ("B", *value.shape[1:])) for name, value in batch.items()}


def tokens(vocab: int, seq: int) -> Callable[[int, int], Batch]:
    return partial(token_batch, vocab=vocab, seq=seq)


def own_models() -> Iterator[ZooModel]:
    short, long = tokens(32, 8), tokens(256, 32)

    small = dict(layers=2, dim=16, heads=2, vocab=32, context=8)
    large = dict(layers=4, dim=64, heads=4, vocab=256, context=64)
    yield own("gpt", "tiny", "gpt:GPT", small, short, "dropout")
    yield own("gpt", "small", "gpt:GPT", large | dict(dropout=0.2), long, "dropout")
    yield own("gpt-tied", "tiny", "gpt:GPT", small | dict(dropout=0.0, tied=True), short, "tied")
    yield own("gpt-attention-dropout", "tiny", "gpt:GPT", small | dict(attention_dropout=0.1), short, "dropout")

    small = dict(layers=2, dim=16, heads=4, kv_heads=2, vocab=32, context=16)
    large = dict(layers=4, dim=64, heads=8, kv_heads=4, vocab=256, context=64)
    odd = dict(layers=3, dim=24, heads=3, kv_heads=1, vocab=37, hidden=40, context=16)
    yield own("llama", "tiny", "llama:Llama", small, short)
    yield own("llama", "small", "llama:Llama", large, long)
    yield own("llama-odd", "tiny", "llama:Llama", odd, tokens(37, 7))

    few, all_four = dict(rank=2), dict(rank=4, targets=("wq", "wk", "wv", "wo"), dropout=0.1)
    yield own("lora", "tiny", "lora:LoRALlama", few | small, short, "frozen")
    yield own("lora", "small", "lora:LoRALlama", all_four | large, long, "frozen", "dropout")

    pairs = partial(translation_batch, vocab=32, source=7, target=5)
    yield own("encdec", "tiny", "encdec:EncoderDecoder", dict(layers=2, dim=16, heads=2, vocab=32, context=8), pairs)
    pairs = partial(translation_batch, vocab=256, source=24, target=16)
    yield own("encdec", "small", "encdec:EncoderDecoder", dict(layers=3, dim=64, heads=4, vocab=256, context=32), pairs)

    images = partial(image_batch, image=8, classes=5)
    small = dict(layers=2, dim=16, heads=2, image=8, patch=4, classes=5)
    yield own("vit", "tiny", "vit:ViT", small, images, "metrics")
    shallow = dict(blocks=(1, 1), width=4, classes=5)
    yield own("resnet", "tiny", "resnet:ResNet", shallow, images, "batchnorm", "inplace")
    images = partial(image_batch, image=16, classes=10)
    large = dict(layers=4, dim=32, heads=4, image=16, patch=4, classes=10, label_smoothing=0.1)
    yield own("vit", "small", "vit:ViT", large, images, "metrics")
    deep = dict(blocks=(2, 2), width=8, classes=10)
    yield own("resnet", "small", "resnet:ResNet", deep, images, "batchnorm", "inplace")

    vectors = partial(vector_batch, dim=6, classes=3)
    yield own("mlp", "tiny", "mlp:MLP", dict(dim=6, hidden=8, classes=3), vectors, "tied", "unused")
    vectors = partial(vector_batch, dim=16, classes=10)
    many = ("relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "softplus", "mish", "hardswish", "relu6")
    large = dict(dim=16, hidden=32, classes=10, activations=many)
    yield own("mlp", "small", "mlp:MLP", large, vectors, "tied", "unused")


CASE_TRAITS = {
    "c01_tied_pp": {"tied"},
    "c06_frozen_front": {"frozen"},
    "c11_batchnorm": {"batchnorm"},
    "c12_dropout": {"dropout"},
    "c28_branch": {"branch"},
    "c43_inplace": {"inplace"},
}


def cases() -> Iterator[ZooModel]:
    for path in sorted((Path(__file__).parent / "cases").glob("c*.py")):
        name = path.stem
        module = importlib.import_module(f"tests.cases.{name}")

        def rotated(n: int, seed: int, sample=module.sample_batch) -> Batch:
            return {key: value.roll(seed, 0) for key, value in sample(n).items()}

        yield ZooModel(
            name,
            f"tests.cases.{name}:build",
            {},
            inputs_of(module.sample_batch(2)),
            rotated,
            traits=frozenset(CASE_TRAITS.get(name, ())),
            plans=tuple(module.PLANS),
            expect=module.EXPECT,
        )


def hugging_face() -> Iterator[ZooModel]:
    if importlib.util.find_spec("transformers") is None:
        return
    common = dict(attn_implementation="sdpa", use_cache=False)
    llama = dict(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    gpt2 = dict(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    still = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    models = {
        "hf-llama": (dict(config="LlamaConfig", **llama), set()),
        "hf-qwen3": (dict(config="Qwen3Config", head_dim=4, **llama), set()),
        "hf-gemma3": (
            dict(config="Gemma3TextConfig", head_dim=4, sliding_window=3, **llama),
            {"tied"},
        ),
        "hf-gpt2": (dict(config="GPT2Config", **gpt2, **still), {"tied"}),
        "hf-gpt2-dropout": (dict(config="GPT2Config", **gpt2), {"tied", "dropout"}),
    }
    make_batch = partial(token_batch, vocab=32, seq=8, tokens="input_ids")
    for name, (options, traits) in models.items():
        yield ZooModel(
            name,
            "transformers:AutoModelForCausalLM.from_config",
            options | common,
            inputs_of(make_batch(2, 0)),
            make_batch,
            traits=frozenset(traits | {"metrics"}),
        )


ZOO: tuple[ZooModel, ...] = (*own_models(), *cases(), *hugging_face())
