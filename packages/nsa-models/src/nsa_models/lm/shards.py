"""Checkpoints of several processes: each writes and reads its own shards of the tensors.

torch.distributed.checkpoint plans which process writes which part of each tensor, and which parts a
process reads into its own shards. The storage is ours, because that of PyTorch pickles its metadata
or overwrites the last checkpoint: every shard is a safetensors file with digests and a name that no
other save uses, and the index of the shards is JSON. The caller writes the index last, which makes
the save valid.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_planned
from torch.distributed.checkpoint.state_dict_saver import save as save_planned
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from nsa_core.errors import InvalidInput
from nsa_core.util import safetensors_io

FORMAT = "nsa-language-model-shard 1"


class Chunk(NamedTuple):
    """A part of a tensor: where it lies in the tensor, and where it is stored."""

    offsets: list[int]
    sizes: list[int]
    file: str  # name in the folder of the checkpoint
    key: str  # name of its tensor in that file


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint and its parts."""

    dtype: str
    shape: list[int]
    chunks: list[Chunk]

    @classmethod
    def of(cls, values: dict[str, Any]) -> Entry:
        """Build an entry from its JSON."""
        return cls(values["dtype"], values["shape"], [Chunk(*c) for c in values["chunks"]])

    @classmethod
    def of_file(cls, file: safetensors_io.TensorFile, name: str) -> Entry:
        """Build the entry of a tensor that a file holds whole."""
        dtype, shape = file.describe(name)
        return cls(dtype, shape, [Chunk([0] * len(shape), shape, file.path.name, name)])


Index = dict[str, Entry]


def save(folder: Path, tensors: dict[str, torch.Tensor], commit: Callable[[Index], None]) -> None:
    """Write each process's shards; every process must call this.

    Args:
        folder: A folder that all processes see.
        tensors: Tensors by name. Each process writes its shard of a DTensor; one process writes a
            tensor that all of them hold.
        commit: Called by one process with the index, when all shards are on the disk.

    Raises:
        NotWritten: A process cannot write; all processes raise this.
    """
    with _reasons():
        save_planned(tensors, storage_writer=_Writer(folder, commit), planner=DefaultSavePlanner())


def load(folder: Path, tensors: dict[str, torch.Tensor], index: Index) -> None:
    """Fill tensors in place from shards of any layout; every process must call this.

    Raises:
        InvalidInput: A tensor is missing or has another shape or dtype, or a file cannot be read;
            all processes raise this.
    """
    wrong = []
    for name, tensor in tensors.items():
        wanted = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        entry = index.get(name)
        stored = None if entry is None else f"{entry.dtype} {entry.shape}"
        if stored != wanted:
            wrong.append(f"{name} must be {wanted}, got {stored}")
    if wrong:
        raise InvalidInput("; ".join(wrong))
    with _reasons(), torch.no_grad():
        if dist.is_initialized():
            load_planned(tensors, storage_reader=_Reader(folder, index))
            return
        for name, tensor in tensors.items():
            tensor.copy_(whole(folder, index[name]))


def whole(folder: Path, entry: Entry) -> torch.Tensor:
    """Return a tensor in one piece."""
    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    for chunk in entry.chunks:
        _part(tensor, chunk.offsets, chunk.sizes).copy_(_stored(folder, chunk))
    return tensor


@contextlib.contextmanager
def _reasons() -> Iterator[None]:
    """Raise the error of the first process that failed, in place of PyTorch's collection."""
    try:
        yield
    except CheckpointException as error:
        failure = error.failures[min(error.failures)]
        raise failure[0] from error


class _Writer(StorageWriter):
    def __init__(self, folder: Path, commit: Callable[[Index], None]) -> None:
        self._folder, self._commit = folder, commit

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        token, count = secrets.token_hex(4), len(plans)
        return [
            dataclasses.replace(plan, storage_data=shard_name(token, number, count))
            for number, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, torch.Tensor] = {}
        results = []
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)  # all values of the state are tensors
            assert item.tensor_data is not None
            offsets = list(item.tensor_data.chunk.offsets)
            key = f"{item.index.fqn}@{','.join(map(str, offsets))}"
            tensors[key] = tensor.detach().cpu().contiguous().clone()
            chunk = Chunk(offsets, list(tensor.shape), plan.storage_data, key)
            results.append(WriteResult(item.index, tensor.nbytes, chunk))
        safetensors_io.write(self._folder / plan.storage_data, FORMAT, tensors, {})
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        chunks: dict[str, list[Chunk]] = {}
        for result in (result for of_process in results for result in of_process):
            chunks.setdefault(result.index.fqn, []).append(result.storage_data)
        index = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            index[name] = Entry(dtype, list(tensor.size), chunks[name])
        self._commit(index)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


class _Reader(StorageReader):
    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._index = folder, index

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _metadata(entry) for name, entry in self._index.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            stored = _stored(self._folder, self._chunk(item.storage_index))
            source = _part(stored, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, position: MetadataIndex) -> Chunk:
        offsets = list(position.offset or ())
        return next(c for c in self._index[position.fqn].chunks if c.offsets == offsets)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


def shard_name(token: str, number: int, count: int) -> str:
    """Return the file name of a shard; ``token`` names the save."""
    return f"checkpoint-{token}-{number + 1}-of-{count}.safetensors"


def _metadata(entry: Entry) -> TensorStorageMetadata:
    properties = TensorProperties(dtype=getattr(torch, entry.dtype))
    chunks = [
        ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks
    ]
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)


def _stored(folder: Path, chunk: Chunk) -> torch.Tensor:
    return safetensors_io.read_tensor(folder / chunk.file, chunk.key)


def _part(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
