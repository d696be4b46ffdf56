"""The code blocks of the documents, and running them.

A document is a script: its blocks run in order, in one empty folder and one Python namespace. A comment before a
block says what else to know:

    <!-- file: net.py -->         the block is that file's content
    <!-- test: --set batch=8 -->  appended to the commands of the block, to keep it short
    <!-- sample -->               the output below is an example: numbers and times will differ

A `text` block below commands is their output: each of its lines must occur there, in order; `…` stands for what was
left out.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compiler.cli import main, output_folder
from compiler.dsl import loads

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the notes from the comment before it."""

    language: str
    text: str
    line: int
    notes: dict[str, str] = field(default_factory=dict)


def blocks(document: str) -> Iterator[Block]:
    for match in re.finditer(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w+)\n(.*?)^```$", document, re.M | re.S):
        word, _, rest = (match[1] or "").partition(":")
        notes = {word.strip(): rest.strip()} if match[1] else {}
        yield Block(match[2], match[3], document.count("\n", 0, match.start(2)) + 1, notes)


@dataclass
class Runner:
    """Runs the blocks of one document in the current folder. `output` is what the last commands printed."""

    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "docs"})
    output: str = ""

    def run(self, block: Block) -> None:
        if "file" in block.notes:
            path = Path(block.notes["file"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        if block.language == "plan":
            loads(block.text if "model" in block.text else f'model "m:M"\ninput x : float32[8]\n{block.text}')
        elif block.language == "sh":
            more = shlex.split(block.notes.get("test", ""))
            self.output = "".join(self.command([*shlex.split(line, comments=True), *more]) for line in lines(block.text))
        elif block.language == "python" and "file" not in block.notes:
            out = io.StringIO()
            with redirect_stdout(out):
                exec(compile(block.text, f"line {block.line}", "exec"), self.names)
            self.output = out.getvalue()
        elif block.language == "text" and "sample" not in block.notes:
            self.compare(block.text)

    def command(self, words: list[str]) -> str:
        """Run one command; what it printed. Raises AssertionError if it failed."""
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), f"no target {words[1]}"
            return ""
        if words[0] in ("git", "cd", "pip"):
            return ""
        if words[0] == "planc":
            return self.planc(words[1:])
        if words[0] == "torchrun":
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
        elif words[0] == "python":
            words = [sys.executable, *words[1:]]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def planc(self, words: list[str]) -> str:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            if words[0] == "run":
                train_here(words[1:])
                status = 0
            else:
                status = main(words)
        text = out.getvalue() + err.getvalue()
        assert "Traceback" not in text
        # A document may show a mistake; then the diagnostic is what it prints.
        assert status == 0 or "error[" in text, f"planc {shlex.join(words)}\n{text}"
        return text.replace(f"{ROOT}/", "")

    def compare(self, text: str) -> None:
        """Each line of the block occurs in the output, in order."""
        rest = self.output
        for line in text.splitlines():
            for piece in filter(None, (piece.strip() for piece in line.split("…"))):
                assert piece in rest, f"not printed (any more):\n{piece}\n--- from here on, the output was:\n{rest[:2000]}"
                rest = rest[rest.index(piece) + len(piece) :]


def train_here(words: list[str]) -> None:
    """`planc run` with all ranks in this process: starting processes is what takes the time."""
    from compiler.cli import parser
    from compiler.driver import compile as compile_plan
    from runtime.train import train
    from runtime.transport import run_ranks

    options = parser().parse_args(["run", *words])
    compilation = compile_plan(options.plan, options.sets)
    folder = compilation.write(output_folder(options, compilation.program.name))
    stream = io.StringIO()
    statuses = run_ranks(
        compilation.program.world,
        lambda transport: train(folder, options.resume, transport, plan=options.plan, stream=stream),
    )
    print(stream.getvalue())
    assert not any(statuses), statuses


def lines(text: str) -> Iterator[str]:
    """The commands of a block; a line that ends with a backslash goes on in the next."""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip().removeprefix("$ ")
        if line and not line.startswith("#"):
            yield line
