"""planc's own version."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

NAME = "planc"


def version() -> str:
    """That of the checkout which this file lies in, else of the installed package."""
    project = Path(__file__).parent.parent / "pyproject.toml"
    if project.is_file():
        described = tomllib.loads(project.read_text("utf-8")).get("project", {})
        if described.get("name") == NAME:
            return str(described["version"])
    return metadata.version(NAME)
