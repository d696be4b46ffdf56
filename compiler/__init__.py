"""planc's compiler: plans to programs.

    compilation = compiler.compile("quickstart.plan", sets=["dp=4"])
    folder = compilation.write("build/quickstart")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compiler.driver import Compilation, Options, compile

__all__ = ["Compilation", "Options", "compile"]


def __getattr__(name: str) -> Any:
    # Imported on first use: reading and checking a plan needs no torch.
    if name in __all__:
        import compiler.driver

        return getattr(compiler.driver, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
