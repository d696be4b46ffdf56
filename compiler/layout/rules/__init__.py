"""The rules of the operators, by kind. Importing this package registers them."""

from compiler.layout.rules import (  # noqa: F401
    attention,
    convolution,
    creation,
    indexing,
    loss,
    matmul,
    normalization,
    opaque,
    pointwise,
    reductions,
    views,
)
