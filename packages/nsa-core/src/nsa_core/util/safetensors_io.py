"""Tensor files in the safetensors format, with a file kind and JSON values in the header."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nsa_core.errors import InvalidInput, NSAError
from nsa_core.util.atomic_files import write_bytes_atomic
from nsa_core.util.extras import require_module
from nsa_core.util.text import describe_error

# Header entries: the kind of file, and a digest of each JSON value and each tensor.
_FORMAT, _DIGESTS = "format", "digests"
_SHOWN_CHANGES = 4


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
        NotWritten: the operating system refuses the write; an old file is unchanged.
    """
    texts = {name: json.dumps(value) for name, value in facts.items()}
    digests = _digests({name: json.loads(text) for name, text in texts.items()}, tensors)
    header = {_FORMAT: kind, **texts, _DIGESTS: json.dumps(digests)}
    write_bytes_atomic(path, _library("safetensors.torch").save(dict(tensors), header), force)


@contextlib.contextmanager
def reading(path: Path, kind: str) -> Iterator[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """Read a file of :func:`write`: the header values and the tensors.

    Errors of the block's body count as errors of the file, because the body validates the content.

    Raises:
        BackendUnavailable: safetensors is not installed.
        InvalidInput: the file cannot be read, is of another kind, was altered since it was written,
            or the body raised an error.
    """
    library = _library("safetensors")
    with _explained(path):
        with library.safe_open(path, framework="pt") as file:
            facts = _header(path, file, kind)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _check_digests(path, facts.pop(_DIGESTS, None), _digests(facts, tensors))
        yield facts, tensors


def _header(path: Path, file: Any, kind: str) -> dict[str, Any]:
    header = file.metadata() or {}
    found = header.get(_FORMAT)
    if found != kind:
        remedy, name = "", kind.rpartition(" ")[0]
        if name and str(found).rpartition(" ")[0] == name:  # another number
            remedy = (
                "; it was written by another version of this library: read it with that version, or"
                " write it again with this one"
            )
        raise InvalidInput(f"{path} is no {kind!r}: its header says {found!r}{remedy}")
    return {name: json.loads(value) for name, value in header.items() if name != _FORMAT}


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    library = _library("safetensors")
    try:
        yield
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


def _digests(facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest of each field of each JSON value, and of each tensor, by its name."""
    values: dict[str, bytes] = {}
    for name, value in facts.items():
        fields = {f".{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {}
        for key, item in (fields or {"": value}).items():
            values[f"{name}{key}"] = json.dumps(item, sort_keys=True).encode()
    digests = {name: hashlib.sha256(text).hexdigest()[:16] for name, text in values.items()}
    return digests | {f"tensor {name}": _tensor_digest(t) for name, t in tensors.items()}


def _tensor_digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    tensor = tensor.contiguous()
    if tensor.nbytes:
        # Reads the memory without a copy and without numpy.
        digest.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return digest.hexdigest()[:16]


def _check_digests(path: Path, stored: object, actual: Mapping[str, str]) -> None:
    """Compare the digests in the header of ``path`` with those of its content.

    Raises:
        InvalidInput: They differ; the message names the fields and tensors.
    """
    if not isinstance(stored, Mapping):
        raise InvalidInput(
            f"{path} has no digests in its header, so it was altered or written by an older"
            " version; restore it from a copy, or write it again"
        )
    changes = [f"{name} is missing" for name in stored if name not in actual]
    changes += [f"{name} was added" for name in actual if name not in stored]
    changes += [
        f"{name} does not match its digest"
        for name, digest in actual.items()
        if name in stored and stored[name] != digest
    ]
    if changes:
        more = len(changes) - _SHOWN_CHANGES
        raise InvalidInput(
            f"{path} was altered after it was written: {'; '.join(changes[:_SHOWN_CHANGES])}"
            f"{f'; and {more} more' if more > 0 else ''}; restore it from a copy, or train again"
        )


def _library(name: str) -> Any:
    return require_module(name, "checkpoints need", "safetensors")
