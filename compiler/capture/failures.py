"""What can go wrong in a capture, as diagnostics."""
from __future__ import annotations

from compiler.ir.graph import Origin


class Unsupported(Exception):
    """The model does something that planc cannot compile. `origin` says where."""

    def __init__(self, what: str, origin: Origin, code: str = "E120", help: str = ""):
        self.what, self.origin, self.code, self.help = what, origin, code, help
        super().__init__(f"{what} ({origin.source})")


def explain(error, request):
    return None
