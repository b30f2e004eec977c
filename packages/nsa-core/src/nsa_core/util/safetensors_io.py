"""Tensor files in the safetensors format, with a file kind and JSON values in the header."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nsa_core.errors import InvalidInput, NSAError
from nsa_core.util.atomic_files import write_bytes_atomic
from nsa_core.util.extras import require_module
from nsa_core.util.text import describe_error

_FORMAT = "format"  # header entry that identifies the kind of file


def write(
    path: Path,
    kind: str,
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
    force: bool = False,
) -> None:
    """Write a tensor file atomically.

    Args:
        path: the file to write.
        kind: identifies the kind of file; :func:`reading` checks it.
        tensors: contiguous tensors on the CPU.
        facts: JSON values for the header.
        force: replace an existing file.

    Raises:
        BackendUnavailable: safetensors is not installed.
        InvalidInput: the file exists and ``force`` is False.
        OSError: the operating system refuses the write; an old file is unchanged.
    """
    header = {_FORMAT: kind, **{name: json.dumps(value) for name, value in facts.items()}}
    write_bytes_atomic(path, _library("safetensors.torch").save(dict(tensors), header), force)


@contextlib.contextmanager
def reading(path: Path, kind: str) -> Iterator[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """Read a file of :func:`write`: the header values and the tensors.

    Errors of the block's body count as errors of the file, because the body validates the content.

    Raises:
        BackendUnavailable: safetensors is not installed.
        InvalidInput: the file cannot be read, is of another kind, or the body raised an error.
    """
    library = _library("safetensors")
    try:
        with library.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get(_FORMAT) != kind:
                raise InvalidInput(
                    f"{path} is no {kind!r}: its header says {header.get(_FORMAT)!r}"
                )
            facts = {name: json.loads(value) for name, value in header.items() if name != _FORMAT}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        yield facts, tensors
    except NSAError:
        raise
    except (
        OSError,
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,
        library.SafetensorError,
    ) as error:
        raise InvalidInput(
            f"{path} cannot be read as a checkpoint: {describe_error(error)}"
        ) from error


def kind_of(path: Path) -> str | None:
    """Return the kind of a file of :func:`write`; None for another file or a missing file.

    Raises:
        BackendUnavailable: safetensors is not installed.
    """
    library = _library("safetensors")
    try:
        with library.safe_open(path, framework="pt") as file:
            kind: str | None = (file.metadata() or {}).get(_FORMAT)
            return kind
    except (OSError, library.SafetensorError):
        return None


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of any safetensors file.

    Raises:
        BackendUnavailable: safetensors is not installed.
        InvalidInput: the file cannot be read.
    """
    library = _library("safetensors")
    try:
        tensors: dict[str, torch.Tensor] = _library("safetensors.torch").load_file(path)
    except (OSError, ValueError, library.SafetensorError) as error:
        raise InvalidInput(
            f"{path} cannot be read as safetensors: {describe_error(error)}"
        ) from error
    return tensors


def _library(name: str) -> Any:
    return require_module(name, "checkpoints need", "safetensors")
