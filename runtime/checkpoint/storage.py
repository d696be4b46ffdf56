"""Tensors in a folder, in the format of `torch.distributed.checkpoint` (DCP), so that its tools read them too.

DCP's own `save` and `load` need a process group, which a simulated job does not have. Here each rank knows by itself
what it writes, so DCP's planners, `FileSystemWriter` and `FileSystemReader` suffice: each rank writes its pieces into a
file of its own and, as DCP does without collectives, an index of them; then one rank joins the indices.

The tensors are read with `torch.load(weights_only=True)`. The index, `.metadata`, is a pickle of DCP's dataclasses:
load checkpoints only from where you would run code from.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from runtime.checkpoint.errors import CheckpointError
from runtime.checkpoint.fit import Form
from runtime.checkpoint.pieces import Held, Piece

# What torch raises for files that are cut short or are none of its own.
_DAMAGED = (OSError, EOFError, RuntimeError, ValueError, KeyError, AttributeError, pickle.UnpicklingError,
            zipfile.BadZipFile)  # fmt: skip


def write(folder: Path, tensors: Mapping[str, Held], rank: int) -> None:
    """Write the pieces that this rank saves, and its index of them, into `folder`, which exists."""
    planner = _SavePlanner(tensors)
    plan = planner.create_local_plan()
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    # The prefix of the files is that of the plan's place in the list of all ranks'.
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
    results = writer.write_data(plan, planner).wait() if plan.items else []
    writer.finish(Metadata(planner.metadata()), [results])


def join(folder: Path, ranks: int) -> None:
    """Make one index of those of all ranks. Raises CheckpointError if together they do not fill every tensor."""
    whole: dict[str, TensorStorageMetadata] = {}
    places: list[WriteResult] = []
    reader = FileSystemReader(folder)
    for rank in range(ranks):
        part = reader.read_metadata(rank=rank)
        for name, entry in part.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            if name in whole:
                whole[name].chunks.extend(entry.chunks)
            else:
                whole[name] = entry
        places += [WriteResult(index, 0, place) for index, place in part.storage_data.items()]
    for name, entry in whole.items():
        written, wanted = sum(math.prod(chunk.sizes) for chunk in entry.chunks), math.prod(entry.size)
        if written != wanted:
            raise CheckpointError(f"{name}: the ranks wrote {written} of {wanted} elements")
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(Metadata(whole), [places])
    for rank in range(ranks):
        (folder / f"__{rank}.metadata").unlink()


def index_of(folder: Path) -> Metadata:
    """The index of a checkpoint. Raises CheckpointError if it is missing or damaged, or one of its files cut short."""
    try:
        metadata = FileSystemReader(folder).read_metadata()
        ends: dict[str, int] = {}
        for place in metadata.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no .metadata") from None
    except _DAMAGED as error:
        raise CheckpointError(f"{folder}/.metadata is damaged: {error}") from error
    for name, end in ends.items():
        size = (folder / name).stat().st_size if (folder / name).exists() else None
        if size is None or size < end:
            state = "is missing" if size is None else f"has {size} of {end} bytes"
            raise CheckpointError(f"{folder} is damaged: its file {name} {state}")
    return metadata


def stored_tensors(metadata: Metadata) -> dict[str, Form]:
    """The tensors of a checkpoint by name."""
    return {
        name: Form(tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read(folder: Path, metadata: Metadata, tensors: Mapping[str, Held]) -> None:
    """Fill the pieces from a checkpoint that has these tensors in these shapes; values are rounded to their dtype.

    One stored piece at a time is in memory besides. Raises CheckpointError if a file is damaged.
    """
    planner = _LoadPlanner(tensors, metadata)
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    try:
        with torch.no_grad():
            reader.read_data(plan, planner).wait()
    except _DAMAGED as error:
        raise CheckpointError(f"{folder} is damaged: {error}") from error


def read_tensor(folder: Path, metadata: Metadata, name: str) -> Tensor:
    """A whole tensor of a checkpoint, on the CPU."""
    found = stored_tensors(metadata)[name]
    tensor = torch.empty(found.shape, dtype=found.dtype)
    read(folder, metadata, {name: Held(found.shape, found.dtype, (Piece((0,) * tensor.dim(), tensor),))})
    return tensor


class _SavePlanner(DefaultSavePlanner):
    """Plans the pieces that a rank saves."""

    def __init__(self, tensors: Mapping[str, Held]):
        super().__init__()
        self.tensors = {name: held for name, held in tensors.items() if held.writes}
        self.pieces = {
            MetadataIndex(name, piece.offsets): piece for name, held in self.tensors.items() for piece in held.pieces
        }

    def create_local_plan(self) -> SavePlan:
        return SavePlan([self._item(index, piece) for index, piece in self.pieces.items()])

    def _item(self, index: MetadataIndex, piece: Piece) -> WriteItem:
        held = self.tensors[index.fqn]
        data = TensorWriteData(_chunk(piece), TensorProperties(dtype=held.dtype), torch.Size(held.shape))
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def metadata(self) -> dict[str, TensorStorageMetadata]:
        return {
            name: TensorStorageMetadata(
                TensorProperties(dtype=held.dtype), torch.Size(held.shape), [_chunk(piece) for piece in held.pieces]
            )
            for name, held in self.tensors.items()
        }

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.pieces[write_item.index].tensor.detach()


class _LoadPlanner(DefaultLoadPlanner):
    """Plans the reads that fill a rank's pieces from the pieces that were saved."""

    def __init__(self, tensors: Mapping[str, Held], metadata: Metadata):
        super().__init__()
        self.tensors, self.metadata = tensors, metadata
        self.pieces = {
            MetadataIndex(name, piece.offsets): piece for name, held in tensors.items() for piece in held.pieces
        }

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, held in self.tensors.items():
            entry = self.metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, entry, [_chunk(piece) for piece in held.pieces])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        view = self.pieces[read_item.dest_index].tensor
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
