"""The documents say what is: every block in them runs, links lead somewhere, and what is not supported is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Runner, blocks
from tests.docs.passes import document

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = [path for path in DOCUMENTS if path.name != "language.md"]  # that one has tests of its own


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_every_block_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "dsl_examples").symlink_to(ROOT / "dsl_examples")
    runner = Runner()
    for block in blocks(path.read_text()):
        try:
            runner.run(block)
        except BaseException as error:
            error.add_note(f"in the {block.language} block at {path.name}:{block.line}")
            raise


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_all_documents_are_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"](docs/{path.name})" in readme for path in (ROOT / "docs").glob("*.md"))


def test_the_document_of_passes_is_current() -> None:
    assert (ROOT / "docs/passes.md").read_text() == document(), "run: python -m tests.docs.passes"
