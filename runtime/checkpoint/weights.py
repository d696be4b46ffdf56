"""Weights by the model's own names in safetensors files: written one tensor at a time, read lazily."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.checkpoint import storage
from runtime.checkpoint.errors import CheckpointError
from runtime.checkpoint.fit import Described, Form, match_names
from runtime.checkpoint.folder import read_state
from runtime.checkpoint.whole import whole_tensors
from runtime.initial import initial_buffers
from runtime.program import Program
from runtime.transport import together

if TYPE_CHECKING:
    from runtime.session import Session

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


# -- writing -----------------------------------------------------------------------------------------------------------


def export_safetensors(source: Session | str | Path, path: str | Path) -> Path:
    """Write whole weights to a safetensors file; `model.load_state_dict(load_file(path))` takes them.

    source: a session (collective: every rank calls it, rank 0 writes), or a checkpoint's folder. Parameters and
    persistent buffers by the model's own names; a tied parameter is written under each of its names. One tensor at a
    time is whole in memory. Raises CheckpointError.
    """
    path = Path(path)
    if isinstance(source, (str, Path)):
        _export_checkpoint(Path(source), path)
    else:
        _export_session(source, path)
    return path


def _export_session(session: Session, path: Path) -> None:
    program, first = session.program, session.transport.rank == 0
    forms = _forms(
        {spec.name: Form(spec.shape, getattr(torch, program.kept_dtypes[spec.name])) for spec in program.parameters},
        {b.name: Form(b.shape, getattr(torch, b.dtype)) for b in program.buffers if b.persistent},
        program.ties,
    )
    with together(session.transport, CheckpointError, f"cannot write {path}"):
        writer = SafetensorsWriter(path, forms) if first else None
    failure: OSError | None = None
    for name, tensor in whole_tensors(session):
        try:
            if writer is not None and failure is None:
                writer.put(name, tensor)
        except OSError as error:  # The others are in the gathers still: go through them all.
            failure = error
    with together(session.transport, CheckpointError, f"cannot write {path}"):
        if writer is not None and failure is not None:
            writer.discard()
            raise failure
        if writer is not None:
            writer.finish()


def _export_checkpoint(folder: Path, path: Path) -> None:
    state, metadata = read_state(folder), storage.index_of(folder)
    stored = storage.stored_tensors(metadata)

    def named(kind: str) -> dict[str, Form]:
        return {name.removeprefix(kind): form for name, form in stored.items() if name.startswith(kind)}

    parameters = named("model.")
    buffers = {name: form for name, form in named("buffer.").items() if name not in state.transient}
    with SafetensorsWriter(path, _forms(parameters, buffers, state.ties)) as writer:
        for name in writer.forms:
            own = state.ties.get(name, name)
            kind = "model" if own in parameters else "buffer"
            writer.put(name, storage.read_tensor(folder, metadata, f"{kind}.{own}"))


def _forms(parameters: Mapping[str, Form], buffers: Mapping[str, Form], ties: Mapping[str, str]) -> dict[str, Form]:
    """All names that the file gets."""
    return {**parameters, **{alias: parameters[name] for alias, name in ties.items()}, **buffers}


class SafetensorsWriter:
    """Writes a safetensors file tensor by tensor, in any order, beside its place; `finish` puts it there.

    (`safetensors` itself writes from whole state dicts only.) Raises CheckpointError for a dtype that the format lacks.
    """

    def __init__(self, path: Path, forms: Mapping[str, Form]):
        self.path, self.forms = path, dict(forms)
        self._begins: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        # The widest dtypes first, as safetensors does: so everything is aligned.
        for name, form in sorted(self.forms.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            if form.dtype not in _NAMES:
                raise CheckpointError(f"{name}: safetensors has no {form.dtype}")
            begin, end = end, end + math.prod(form.shape) * form.dtype.itemsize
            self._begins[name] = begin
            header[name] = {"dtype": _NAMES[form.dtype], "shape": list(form.shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._beside = path.with_name(f".{path.name}.tmp")
        self._file: BinaryIO = self._beside.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def put(self, name: str, tensor: Tensor) -> None:
        form = self.forms[name]
        assert (tuple(tensor.shape), tensor.dtype) == (tuple(form.shape), form.dtype), f"{name} is not as announced"
        self._file.seek(self._data + self._begins[name])
        self._file.write(memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))

    def finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._beside.rename(self.path)

    def discard(self) -> None:
        self._file.close()
        self._beside.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.finish()
        else:
            self.discard()


# -- reading -----------------------------------------------------------------------------------------------------------


class SafetensorsFiles(Mapping[str, Tensor]):
    """The tensors of a safetensors file, or of a folder as Hugging Face lays it out, read from disk when asked for.

    forms: shape and dtype of each, known without reading it. Raises CheckpointError for a file that is none.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._places: dict[str, Any] = {}
        self.forms: dict[str, Described] = {}
        for file in self._files():
            try:
                opened = safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                part = opened.get_slice(name)
                if part.get_dtype() not in _DTYPES:
                    raise CheckpointError(f"{file}: {name} has the unknown dtype {part.get_dtype()}")
                self.forms[name] = Form(tuple(part.get_shape()), _DTYPES[part.get_dtype()])
                self._places[name] = opened

    def _files(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path]
        if (self.path / _INDEX).exists():
            try:
                names = json.loads((self.path / _INDEX).read_text())["weight_map"].values()
            except (ValueError, KeyError, AttributeError) as error:
                raise CheckpointError(f"{self.path / _INDEX} is damaged: {error}") from error
            return [self.path / name for name in dict.fromkeys(names)]
        if (self.path / _SINGLE).exists():
            return [self.path / _SINGLE]
        raise CheckpointError(f"the folder {self.path} holds neither {_SINGLE} nor {_INDEX}")

    def __getitem__(self, name: str) -> Tensor:
        return self._places[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class InitialWeights(Mapping[str, Tensor]):
    """The state of a program, for `Session(state=…)`: weights from a safetensors file or folder, buffers that are not
    persistent as the model makes them. Tensors are views of mapped files: who takes a part of one reads no more.

    Raises CheckpointError if the tensors are not those of the model."""

    def __init__(self, program: Program, path: str | Path):
        self._files = SafetensorsFiles(path)
        try:
            self._names = match_names(program, self._files.forms)
        except CheckpointError as error:
            raise CheckpointError(f"{path} does not fit {program.name}: {error}") from None
        fresh = [b.name for b in program.buffers if not b.persistent]
        self._fresh = initial_buffers(program, int(program.train["seed"]), fresh) if fresh else {}

    def __getitem__(self, name: str) -> Tensor:
        return self._fresh[name] if name in self._fresh else self._files[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        yield from self._names
        yield from self._fresh

    def __len__(self) -> int:
        return len(self._names) + len(self._fresh)
