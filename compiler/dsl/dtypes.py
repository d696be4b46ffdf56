"""The dtypes, by torch's names and the usual short ones."""

from __future__ import annotations

from compiler.dsl.kinds import Choice

FLOATING = ("float64", "float32", "bfloat16", "float16")
_OTHERS = (
    "float8_e4m3fn",
    "float8_e5m2",
    "complex64",
    "complex128",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
)
ALIASES = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "fp8": "float8_e4m3fn",
}
_SHORT = {alias: word for alias, word in ALIASES.items() if word in FLOATING}

# What `precision` takes, and what an `input` takes.
DTYPE = Choice(*FLOATING, aliases=_SHORT, noun="a floating dtype (`bf16`, `fp16`, `fp32`, `fp64`)")
INPUT_DTYPE = Choice(*FLOATING, *_OTHERS, aliases=ALIASES, noun="a dtype")
