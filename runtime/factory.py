"""Calling what a plan names: model factories, losses and datasets.

    build("dsl_examples.models.llama:Llama", {"layers": 4, "dim": 64})
    build("models/net.py:Net", {}, base="plans")                        # a file, relative to the plan's folder
    build("transformers:AutoModelForCausalLM.from_config", {"config": "LlamaConfig", "hidden_size": 64})

A factory is a class or a function that returns a module; it is called with the plan's options. In the last form the
option `config` names a class of the same package: the configuration is built of the other options, and the factory is
called with it.

Every mistake a plan or a model can make here is a `FactoryError` that says what is wrong, why, and what would be right.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

CONFIG_DEFAULTS = {"attn_implementation": "sdpa", "use_cache": False}
"""What a configuration is built with unless the plan says otherwise: attention as one operator, no inference cache."""

PACKAGES = ("transformers", "diffusers", "datasets", "torchvision", "torchaudio", "torchtext", "timm", "einops", "numpy")
"""Packages of models and data that are installed by these names. Any other name may be a misspelled one, and is not to
be installed on a suggestion."""


class FactoryError(Exception):
    """A factory cannot be found or called.

    `what` is wrong, `why`, and a `suggestion` ("" if there is none). `option` names the option at fault; `place` is
    the (file, line) in the user's own code where it happened. `kind` is "path" (there is no such factory), "options"
    (they do not fit) or "call" (it failed).
    """

    def __init__(
        self, what: str, why: str = "", suggestion: str = "", option: str = "",
        place: tuple[str, int] | None = None, kind: str = "path",
    ):  # fmt: skip
        self.what, self.why, self.suggestion, self.option, self.place = what, why, suggestion, option, place
        self.kind = kind
        super().__init__(what)

    def __str__(self) -> str:
        at = f" ({self.place[0]}:{self.place[1]})" if self.place else ""
        return ": ".join(filter(None, (self.what, self.why))) + at + (f"; {self.suggestion}" if self.suggestion else "")


def build(factory: str, options: Mapping[str, Any], base: str | None = None) -> nn.Module:
    """The model: the factory called with the options. Raises FactoryError."""
    make, arguments = prepare(factory, options, base)
    model = _call(factory, make, arguments)
    if not isinstance(model, nn.Module):
        raise FactoryError(
            f"`{factory}` is not a model factory",
            f"it returned {_described(model)}, not a torch.nn.Module",
            "name the module's class, or a function that returns a module",
            kind="call",
        )
    name_plain_tensors(model)
    return model


def prepare(
    factory: str, options: Mapping[str, Any], base: str | None = None
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The factory and the arguments that it is to be called with, which fit it. Raises FactoryError."""
    make = resolve(factory, base)
    arguments = dict(options)
    config = arguments.get("config")
    if isinstance(config, str):
        module = _module(factory, base)
        if isinstance(getattr(module, config, None), type) or not _takes(make, arguments):
            arguments = {"config": _configuration(factory, module, config, arguments)}
    check_arguments(factory, make, arguments)
    return make, arguments


def resolve(path: str, base: str | None = None) -> Callable[..., Any]:
    """The callable that `module:Qual.name` or `file.py:Qual.name` names. Raises FactoryError."""
    _, colon, attributes = path.rpartition(":")
    if not colon or not attributes:
        raise FactoryError(
            f"`{path}` names no factory", "it has no `:`", 'write "package.module:Name" or "path/to/file.py:Name"'
        )
    found: Any = _module(path, base)
    for k, name in enumerate(attributes.split(".")):
        owner = path.rpartition(":")[0] if k == 0 else ".".join(attributes.split(".")[:k])
        try:
            found = getattr(found, name)
        except AttributeError:
            public = [item for item in dir(found) if not item.startswith("_")]
            raise FactoryError(f"`{owner}` has no `{name}`", "", _did_you_mean(name, public)) from None
        except Exception as error:  # a lazy package fails to import what was asked for
            raise FactoryError(f"`{path}` cannot be imported", _short(error), place=user_place(error)) from error
    if not callable(found):
        raise FactoryError(f"`{path}` cannot be called", f"it is {_described(found)}")
    return found


def check_arguments(factory: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise FactoryError if the call would not fit the callable's signature."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return  # nothing is known: the call itself will tell
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in arguments:
        if name not in named and not takes_any:
            raise FactoryError(
                f"`{factory}` has no option `{name}`",
                "it takes " + (", ".join(f"`{n}`" for n in named) or "no options"),
                _did_you_mean(name, named),
                option=name,
                kind="options",
            )
    required = [n for n in named if parameters[n].default is inspect.Parameter.empty]
    missing = [name for name in required if name not in arguments]
    if missing:
        listed = ", ".join(f"`{name}`" for name in missing)
        raise FactoryError(
            f"`{factory}` needs {listed}",
            "the plan does not give a value",
            f"add `{missing[0]} = …` to its options",
            kind="options",
        )


def forward_arguments(model: nn.Module | type[nn.Module]) -> tuple[list[str], list[str], bool]:
    """(names of forward's arguments, those without a default, whether it takes any other name too)."""
    parameters = dict(inspect.signature(model.forward).parameters)
    if isinstance(model, type):
        parameters.pop(next(iter(parameters), ""), None)  # self
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = [name for name, p in named.items() if p.default is inspect.Parameter.empty]
    return list(named), required, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def forward_inputs(model: nn.Module, names: Iterable[str], has_loss: bool) -> list[str]:
    """The inputs that are passed to forward: all of them, or with a `loss` function those that forward takes."""
    named, _, takes_any = forward_arguments(model)
    return [name for name in names if not has_loss or takes_any or name in named]


def name_plain_tensors(model: nn.Module) -> None:
    """Make tensors that a module holds as plain attributes buffers that are not saved.

    So they have a name, and follow the model to its device. Those that depend on a parameter are left alone.
    """
    held = {id(tensor) for tensor in model.parameters()} | {_storage(tensor) for tensor in model.parameters()}
    for module in model.modules():
        for name, item in list(vars(module).items()):
            if not isinstance(item, torch.Tensor) or isinstance(item, nn.Parameter) or "." in name:
                continue
            if item.requires_grad or item.grad_fn is not None or id(item) in held or _storage(item) in held:
                continue
            delattr(module, name)
            module.register_buffer(name, item, persistent=False)


def user_place(error: BaseException) -> tuple[str, int] | None:
    """(file, line) of the innermost frame that is neither torch's, nor the standard library's, nor ours."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return error.filename, error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not _is_library(frame.filename) and frame.lineno:
            return frame.filename, frame.lineno
    return None


def told(error: BaseException) -> str:
    """An error of the user's own code in one line: its kind, its message, and its place there."""
    place = user_place(error)
    return _short(error) + (f" ({place[0]}:{place[1]})" if place else "")


# -- finding -----------------------------------------------------------------------------------------------------------


def _module(path: str, base: str | None) -> ModuleType:
    """The module of `module:name` or `file.py:name`."""
    where = path.rpartition(":")[0]
    if where.endswith(".py"):
        return _module_of_file(path, Path(base or ".") / where)
    if not where or not all(part.isidentifier() for part in where.split(".")):
        raise FactoryError(
            f"`{where}` is no module name", "", 'write "package.module:Name" or "path/to/file.py:Name"'
        )
    for folder in (str(Path.cwd()), str(Path(base).resolve()) if base else ""):
        if folder and folder not in sys.path:
            sys.path.append(folder)  # last, so that it hides nothing
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        missing = error.name or where
        if where == missing or where.startswith(missing + "."):
            raise FactoryError(f"there is no module `{missing}`", *_near_module(missing)) from None
        raise FactoryError(
            f"`{where}` cannot be imported", _short(error), _near_module(missing)[1], place=user_place(error)
        ) from error
    except Exception as error:
        raise FactoryError(f"`{where}` cannot be imported", _short(error), place=user_place(error)) from error


def _module_of_file(path: str, file: Path) -> ModuleType:
    if not file.is_file():
        folder = file.parent
        found = sorted(p.name for p in folder.glob("*.py")) if folder.is_dir() else []
        why = f"{file} does not exist" if folder.is_dir() else f"the folder {folder} does not exist"
        raise FactoryError(f"`{path}` cannot be loaded", why, _did_you_mean(file.name, found) if found else "")
    file = file.resolve()
    digest = hashlib.sha1(f"{file}:{file.stat().st_mtime_ns}".encode()).hexdigest()[:8]
    name = f"planc_user_{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # for what stands beside the file
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise FactoryError(f"`{path}` cannot be loaded", _short(error), place=user_place(error)) from error
    return module


def _near_module(name: str) -> tuple[str, str]:
    """(why, suggestion) for a module that is not there."""
    parent, _, last = name.rpartition(".")
    if parent:
        folders = getattr(sys.modules.get(parent), "__path__", [])
        found = [p.stem if p.suffix == ".py" else p.name for f in folders for p in Path(f).iterdir()]
        return f"`{parent}` has no part called `{last}`", _did_you_mean(last, found)
    why = "it is not installed, and neither the plan's folder nor the working directory has it"
    beside = [p.stem if p.suffix == ".py" else p.name for p in Path.cwd().iterdir()]
    near = difflib.get_close_matches(name, [item for item in (*beside, *PACKAGES) if item.isidentifier()], n=1)
    if name in PACKAGES:
        return why, f"pip install {name}"
    return why, f"did you mean `{near[0]}`?" if near else ""


# -- calling -----------------------------------------------------------------------------------------------------------


def _call(factory: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return make(**arguments)
    except FactoryError:
        raise
    except Exception as error:
        raise FactoryError(
            f"`{factory}` failed when it was called",
            _short(error),
            "",
            _option_in(error, arguments),
            user_place(error),
            "call",
        ) from error


def _takes(make: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    """Whether every argument is a named parameter of the callable."""
    try:
        return set(arguments) <= set(inspect.signature(make).parameters)
    except (TypeError, ValueError):
        return True


def _configuration(factory: str, module: ModuleType, name: str, options: Mapping[str, Any]) -> Any:
    """The configuration that `config = "Name"` and the other options describe."""
    make = getattr(module, name, None)
    if not callable(make):
        configs = [item for item in dir(module) if item.endswith("Config")]
        raise FactoryError(
            f"`{module.__name__}` has no configuration `{name}`", "", _did_you_mean(name, configs), option="config",
            kind="options",
        )  # fmt: skip
    given = {key: value for key, value in options.items() if key != "config"}
    known = _known_options(make)
    defaults = CONFIG_DEFAULTS if known is None or "use_cache" in known or _takes_any(make) else {}
    made = _call(f"{module.__name__}:{name}", make, {**defaults, **given})
    for key in given:
        # Such a class keeps any name that it does not know: a misspelled option would silently do nothing.
        if known is not None and key not in known and key in getattr(made, "__dict__", ()):
            raise FactoryError(
                f"`{name}` has no option `{key}`", "", _did_you_mean(key, known), option=key, kind="options"
            )
    return made


def _known_options(make: Callable[..., Any]) -> set[str] | None:
    """The option names of a configuration class; None if they cannot be known."""
    try:
        names = {n for n, p in inspect.signature(make).parameters.items() if p.kind is not p.VAR_KEYWORD}
    except (TypeError, ValueError):
        return None
    try:
        default = make()
    except Exception:
        return None
    return names | {n for n in dir(default) if not n.startswith("_")} | set(getattr(default, "attribute_map", ()))


def _takes_any(make: Callable[..., Any]) -> bool:
    try:
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(make).parameters.values())
    except (TypeError, ValueError):
        return True


# -- wording -----------------------------------------------------------------------------------------------------------


def _did_you_mean(name: str, candidates: Iterable[str]) -> str:
    pool = {item.lower(): item for item in candidates}
    near = difflib.get_close_matches(name.lower(), pool, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{pool[near[0]]}`?"
    listed = sorted(pool.values())
    return f"it has: {', '.join(f'`{item}`' for item in listed)}" if 0 < len(listed) <= 12 else ""


def _described(item: Any) -> str:
    if item is None:
        return "None"
    if isinstance(item, (str, int, float, bool)):
        return repr(item)
    return f"a {type(item).__name__}"


def _short(error: BaseException) -> str:
    """The error's kind and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _option_in(error: BaseException, arguments: Mapping[str, Any]) -> str:
    """The option that the message names, if it names exactly one."""
    words = set("".join(c if c.isalnum() or c == "_" else " " for c in str(error)).split())
    named = [name for name in arguments if name in words]
    return named[0] if len(named) == 1 else ""


def _is_library(file: str) -> bool:
    """Whether a source file is of an installed package, of Python itself, or planc's own."""
    if file.startswith("<"):
        return True
    path = Path(file)
    own = Path(__file__).resolve().parent.parent
    return (
        "site-packages" in path.parts
        or "dist-packages" in path.parts
        or path.is_relative_to(Path(traceback.__file__).parent)
        or path.is_relative_to(own / "runtime")
        or path.is_relative_to(own / "compiler")
    )


def _storage(tensor: torch.Tensor) -> tuple[str, int]:
    try:
        return "storage", tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return "tensor", id(tensor)
