"""docs/passes.md, made from the docstrings of the passes.

    python -m tests.docs.passes        # writes it
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import compiler.passes.assign_layouts as assign_layouts
from compiler.dsl import loads
from compiler.passes.lift_vary import LiftVary
from compiler.passes.pipeline import lowering
from compiler.passes.resolve_counts import ResolveCounts

PATH = Path(__file__).parents[2] / "docs" / "passes.md"
PLAN = 'model "m:M"\ninput x : float32[4]\nmesh dp=2\ndata over dp\n'

HEAD = """\
# Passes

<!-- Made from the docstrings in compiler/passes by `python -m tests.docs.passes`. -->

Capture gives one graph of the model at global shapes. The passes below rewrite it, in this order; what comes after
them (segments, differentiation, the schedule) is described in [architecture.md](architecture.md).

A pass is a frozen dataclass: its fields are its options, `requires` and `provides` its contract. The runner
(`compiler/passes/base.py`) checks the contract before each pass and the graph after it
(`compiler/ir/verify.py`: single assignment, operands before use, unique names, layouts that fit the shapes).

To see the graph after a pass, or after each:

```sh
planc compile dsl_examples/mlp.plan --dump-after lower_losses
planc compile dsl_examples/mlp.plan --dump-after all
```

The printed form parses back (`compiler.ir.text.parse_graph`). Tests compare whole plans with their printed graphs in
`tests/golden`.
"""


def entries() -> Iterator[tuple[str, str, str, str]]:
    """Name, file, contract, and text of each pass, in the order in which they run."""
    for item in lowering(loads(PLAN)):
        yield described(item)
    yield "assign_layouts", "assign_layouts.py", "", inspect.getdoc(assign_layouts) or ""
    for item in (ResolveCounts(), LiftVary()):
        yield described(item)


def described(item: object) -> tuple[str, str, str, str]:
    module = inspect.getmodule(type(item))
    name, requires, provides = (getattr(item, field) for field in ("name", "requires", "provides"))
    contract = [f"requires {', '.join(sorted(requires))}"] if requires else []
    contract += [f"provides {', '.join(sorted(provides))}"] if provides else []
    text = f"{inspect.getdoc(module)}\n\n{inspect.getdoc(type(item))}"
    return name, Path(inspect.getfile(type(item))).name, "; ".join(contract), text


def document() -> str:
    """The whole document."""
    parts = [HEAD]
    for name, file, contract, text in entries():
        summary, _, rest = text.partition("\n\n")
        first = re.sub(r"\s+", " ", summary.removeprefix(f"{name}: "))
        where = f"`compiler/passes/{file}`" + (f"; {contract}" if contract else "")
        parts.append(f"## {name}\n\n{first[0].upper()}{first[1:]}\n\n{where}\n\n{fenced(rest)}\n")
    return "\n".join(parts)


def fenced(text: str) -> str:
    """Indented paragraphs become blocks of IR."""
    found = []
    for paragraph in re.split(r"\n\n(?! )", text.strip("\n")):
        head, *tail = re.split(r"\n\n(?= )", paragraph)
        for piece in (head, *tail):
            if piece.startswith(("    ", "before:")):
                piece = f"```mlir\n{textwrap.dedent(piece)}\n```"
            found.append(piece)
    return "\n\n".join(found)


if __name__ == "__main__":
    PATH.write_text(document())
