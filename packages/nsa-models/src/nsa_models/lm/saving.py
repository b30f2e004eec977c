"""Write a model folder: see :mod:`nsa_models.lm.model_folder`, which reads it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nsa_core.util.atomic_files import NotWritten, write_atomic, writing
from nsa_core.util.extras import require_module
from nsa_models.lm import weights
from nsa_models.lm.head_shards import HeadShards, unshard
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.model_folder import (
    FORMAT,
    MOMENTS,
    WEIGHTS,
    Training,
    file_facts,
    index_digest,
)
from nsa_models.lm.parallel import World
from nsa_models.lm.run_folder import CONFIG, INDEX, OPTIMIZER

Tensors = dict[str, torch.Tensor]


def save_run(
    folder: Path,
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    training: Training,
    files: Mapping[str, str],
    world: World,
    heads: HeadShards | None = None,
) -> None:
    """Save a run, replacing the state that the folder has; every process must call this.

    Each process writes its share of the tensors, each of them whole, so that no process holds the
    whole model. The folder must be on a disk that all processes see.

    Args:
        folder: An existing folder.
        model: The model.
        optimizer: Its optimizer.
        training: The state of the run.
        files: The text of config.json and of the tokenizer's files, by name.
        world: The processes.
        heads: The parameters that tensor parallelism divides; None without it.

    Raises:
        NotWritten: A process cannot write; all processes raise this, and the state that the folder
            had is unchanged.
        BackendUnavailable: safetensors is not installed.
    """
    own, moments = _own_tensors(model, optimizer, world, heads)
    for kind, state in random_state().items():
        moments[f"random.{kind}.{world.rank}"] = state
    token = world.collect(secrets.token_hex(4))[0]
    name = f"{training.step}-{token}-{world.rank + 1}-of-{world.size}.safetensors"
    parts = {f"model-{name}": own, f"{OPTIMIZER}/{name}": moments}
    written: dict[str, Any] = {}
    with _together(world) as errors:
        for file, tensors in parts.items():
            if tensors:
                _write_tensors(folder / file, tensors, training.step)
                written[file] = file_facts(folder / file)
    if errors:
        for file in parts:
            with contextlib.suppress(OSError):
                (folder / file).unlink()
        raise errors[0]
    facts: dict[str, Any] = {}
    places: dict[str, str] = {}
    shares = (written, dict.fromkeys(own, f"model-{name}"), sum(t.nbytes for t in own.values()))
    total = 0
    for files_of, places_of, bytes_of in world.collect(shares):
        facts, places, total = facts | files_of, places | places_of, total + bytes_of
    with _together(world) as errors:
        if world.rank == 0:
            for file, text in files.items():
                _write_text(folder / file, text)
            facts |= {file: file_facts(folder / file) for file in files}
            _write_index(folder, places, total, facts, training)
    if errors:
        raise errors[0]
    if world.rank == 0:
        # Until here the old state was valid, from here the new one is.
        remove_tensors(folder, keep=facts)


@contextlib.contextmanager
def _together(world: World) -> Iterator[list[NotWritten]]:
    """Yield a list that has the error of the first process whose block could not write."""
    errors: list[NotWritten] = []
    own: tuple[int, str, str] | None = None
    try:
        yield errors
    except NotWritten as error:
        own = (error.errno or errno.EIO, error.strerror or str(error), str(error.filename))
    for found in world.collect(own):
        if found is not None and not errors:
            errors.append(NotWritten(*found))


def _own_tensors(
    model: LanguageModel, optimizer: torch.optim.Optimizer, world: World, heads: HeadShards | None
) -> tuple[Tensors, Tensors]:
    """Return this process's share of the weights and of the moments, whole and on the CPU."""
    parameters = dict(model.named_parameters())
    # Each process has about the same number of bytes; all processes divide alike.
    order = sorted(parameters, key=lambda name: (-parameters[name].numel(), name))
    sizes, is_own = [0] * world.size, {}
    for name in order:
        rank = sizes.index(min(sizes))
        sizes[rank] += parameters[name].numel()
        is_own[name] = rank == world.rank
    divided = heads.names if heads is not None else frozenset()
    own: Tensors = {}
    moments: Tensors = {}

    def keep(name: str, whole: torch.Tensor, moment: str | None) -> None:
        if not is_own[name]:
            return
        tensor = whole.cpu().contiguous()
        if moment is None:
            own.update(weights.split(name, tensor, model.config))
        else:
            moments[f"{moment}.{name}"] = tensor

    for moment in (None, *MOMENTS):
        of_heads: Tensors = {}
        for name, parameter in parameters.items():
            # During a forward FSDP shows gathered parameters, which are not those that it trains.
            assert parameter in optimizer.state or not optimizer.state, (
                f"{name} is not a parameter of the optimizer; reshard the model first"
            )
            # get: a lookup would add the parameter to the state.
            state = optimizer.state.get(parameter, {})
            tensor = parameter if moment is None else state.get(moment)
            if tensor is None:  # before the first step
                continue
            if name in divided:
                of_heads[name] = tensor.detach()
            else:
                keep(name, unshard(tensor), moment)
        if of_heads:
            assert heads is not None  # else nothing is divided
            for name, whole in heads.whole(of_heads):
                keep(name, whole, moment)
    return own, moments


def _write_tensors(file: Path, tensors: Tensors, step: int) -> None:
    library = require_module("safetensors.torch", "model folders need", "safetensors")
    error_class = require_module("safetensors", "model folders need", "safetensors").SafetensorError
    with writing(file):
        file.parent.mkdir(exist_ok=True)
        with open(file, "xb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
        try:
            library.save_file(tensors, file, {"format": "pt", "step": str(step)})
        except error_class as error:
            raise _system_error(error) from error
        os.chmod(file, mode)  # the library's files are for their owner only
        _sync(file)
        _sync(file.parent)


def _system_error(error: Exception) -> OSError:
    """Return the operating system's error, which safetensors reports as a text."""
    match = re.search(r"os error (\d+)", str(error))
    if match is None:
        return OSError(errno.EIO, str(error))
    return OSError(int(match[1]), os.strerror(int(match[1])))


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_text(file: Path, text: str) -> None:
    with writing(file):
        if file.is_file() and file.read_bytes() == text.encode():
            return
    write_atomic(file, text, force=True)


def _write_index(
    folder: Path,
    places: Mapping[str, str],
    total: int,
    facts: Mapping[str, Any],
    training: Training | None,
) -> None:
    own: dict[str, Any] = {
        "format": FORMAT,
        "files": dict(facts),
        "training": None if training is None else dataclasses.asdict(training),
    }
    index = {
        "metadata": {"total_size": total, "nsa": own},
        "weight_map": {name: places[name] for name in sorted(places)},
    }
    index = json.loads(json.dumps(index))  # tuples become lists, as in the file
    index["metadata"]["nsa"]["digest"] = index_digest(index)
    write_atomic(folder / INDEX, json.dumps(index, indent=1) + "\n", force=True)
    with writing(folder / INDEX):
        _sync(folder)


def remove_tensors(folder: Path, keep: Mapping[str, Any] | None = None) -> None:
    """Remove tensor files of earlier saves and of saves that did not end.

    Args:
        folder: The folder.
        keep: Names of files that stay; None removes the index too, first of all.
    """
    if keep is None:
        (folder / INDEX).unlink(missing_ok=True)
    for path in (*folder.glob("model-*.safetensors"), *folder.glob(f"{OPTIMIZER}/*.safetensors")):
        if path.relative_to(folder).as_posix() not in (keep or ()):
            with contextlib.suppress(OSError):
                path.unlink()


def seal(folder: Path) -> None:
    """Add the index with digests to a folder that save_pretrained wrote.

    Args:
        folder: The folder, which no other process uses yet.

    Raises:
        NotWritten: A file cannot be written.
    """
    library = require_module("safetensors", "model folders need", "safetensors")
    with writing(folder):
        if (folder / WEIGHTS).exists():
            name = "model-00001-of-00001.safetensors"
            (folder / WEIGHTS).rename(folder / name)
            with library.safe_open(folder / name, framework="pt") as file:
                places = dict.fromkeys(file.keys(), name)
        else:
            places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = sorted(path.name for path in folder.iterdir() if path.name != INDEX)
        facts = {name: file_facts(folder / name) for name in names}
        total = sum((folder / name).stat().st_size for name in set(places.values()))
    _write_index(folder, places, total, facts, None)


def random_state() -> dict[str, torch.Tensor]:
    """Return PyTorch's random states of the CPU and of this process's GPU, as bytes."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def text_files(values: Mapping[str, Any], tokenizer_files: Mapping[str, str]) -> dict[str, str]:
    """Return the texts that a run needs beside its tensors, by file name."""
    return {CONFIG: json.dumps(values, indent=2) + "\n", **tokenizer_files}
