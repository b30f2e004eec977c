"""Checkpoints: a safetensors file with the model, the optimizer and the random states.

All other facts are JSON in the file's header. If there are several processes, each writes a further
file, a shard, with its part of the model and the optimizer, and the header has the index of the
shards. A checkpoint is never a pickle and is written atomically: the file with the index is written
last, and replaces the old one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nsa_core.errors import InvalidInput
from nsa_core.util import safetensors_io
from nsa_core.util.text import describe_error
from nsa_models.lm import shards
from nsa_models.lm.config import LMConfig
from nsa_models.lm.head_shards import HeadShards
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.run_folder import CHECKPOINT, remove_shards
from nsa_models.lm.tokens import Tokenizer, tokenizer_from_dict

FORMAT = "nsa-language-model 2"
FILE = CHECKPOINT
_FACTS = ("train", "data", "position", "step", "tokens")
_MODEL, _OPTIMIZER, _RANDOM = "model.", "optimizer.", "random."


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint whose header is read; its tensors stay in its files until they are needed."""

    path: Path
    config: LMConfig
    facts: dict[str, Any]  # JSON of the header: train, data, position, step, tokens
    tokenizer: dict[str, str] | None
    index: shards.Index

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Read all tensors, whole, to the CPU."""
        return self._with_prefix("")

    def model(self, backends: str | Mapping[str, str] | None = None) -> LanguageModel:
        """Build the model on the CPU.

        Args:
            backends: As in :class:`nsa_core.NSAttention`.

        Raises:
            InvalidInput: The tensors do not match the configuration.
        """
        model = LanguageModel(self.config, backends)
        state = self._with_prefix(_MODEL)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise InvalidInput(f"{self.path}: {describe_error(error)}") from error
        return model

    @property
    def libraries(self) -> list[str]:
        """Return the optional libraries that the tokenizer needs."""
        is_file = self.tokenizer is not None and self.tokenizer.get("kind") == "tokenizers"
        return ["tokenizers"] if is_file else []

    def load_tokenizer(self) -> Tokenizer | None:
        """Build the tokenizer; None if the model was trained on a synthetic task."""
        return None if self.tokenizer is None else tokenizer_from_dict(self.tokenizer)

    def restore(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        heads: HeadShards | None = None,
    ) -> None:
        """Restore parameters, optimizer moments and random states; every process must call this.

        A process reads the parts of its own shards only, tensor by tensor, in whatever layout they
        were written.

        Args:
            model: The model.
            optimizer: Its optimizer.
            heads: The parameters that are divided over tensor parallel ranks; None if none are.

        Raises:
            InvalidInput: The tensors do not match the model, or a file cannot be read.
        """
        if model.config != self.config:
            raise InvalidInput(
                f"{self.path} is of a model with other sizes: its config is {self.config}, the"
                f" model's is {model.config}"
            )
        tensors: dict[str, torch.Tensor] = {}
        fused = any(group.get("fused") for group in optimizer.param_groups)
        # The optimizer has no state before the first step.
        has_moments = any(name.startswith(_OPTIMIZER) for name in self.index)
        for name, parameter in model.named_parameters():
            tensors[f"{_MODEL}{name}"] = parameter
            if has_moments:
                moments = optimizer.state[parameter]
                for key in ("exp_avg", "exp_avg_sq"):
                    moments[key] = torch.zeros_like(parameter, requires_grad=False)
                moments["step"] = torch.zeros((), device=parameter.device if fused else "cpu")
                tensors |= {f"{_OPTIMIZER}{name}.{key}": value for key, value in moments.items()}
        divided = _take_divided(tensors, heads)
        shards.load(self.path.parent, tensors, self.index)
        for form, own in divided.items():
            assert heads is not None  # else nothing is divided
            heads.fill(own, functools.partial(self._whole, form))
        set_random_state(self._with_prefix(_RANDOM))

    def _whole(self, form: str, name: str) -> torch.Tensor:
        return shards.whole(self.path.parent, self.index[form.format(name)])

    def _with_prefix(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            name.removeprefix(prefix): shards.whole(self.path.parent, entry)
            for name, entry in self.index.items()
            if name.startswith(prefix)
        }


def collect_tensors(
    model: LanguageModel, optimizer: torch.optim.Optimizer, heads: HeadShards | None = None
) -> dict[str, torch.Tensor]:
    """Collect the tensors of model and optimizer, without copies; sharded ones are DTensors.

    With ``heads``, every process must call this, and each divided tensor is gathered to the CPU of
    one process.

    Args:
        model: The model.
        optimizer: Its optimizer.
        heads: The parameters that are divided over tensor parallel ranks; None if none are.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"{_MODEL}{name}"] = parameter.detach()
        # During a forward FSDP shows gathered parameters, which are not those that it trains.
        assert parameter in optimizer.state or not optimizer.state, (
            f"{name} is not a parameter of the optimizer; reshard the model first"
        )
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{_OPTIMIZER}{name}.{key}"] = value
    for form, own in _take_divided(tensors, heads).items():
        assert heads is not None  # else nothing is divided
        for number, (name, whole) in enumerate(heads.whole(own)):
            if number % dist.get_world_size() == dist.get_rank():
                tensors[form.format(name)] = whole.cpu()
    return tensors


def _take_divided(
    tensors: dict[str, torch.Tensor], heads: HeadShards | None
) -> dict[str, dict[str, torch.Tensor]]:
    """Remove divided tensors from ``tensors``, and return them by form and parameter name."""
    divided: dict[str, dict[str, torch.Tensor]] = {}
    for name in sorted(heads.names) if heads is not None else ():
        for form in (f"{_MODEL}{{}}", f"{_OPTIMIZER}{{}}.exp_avg", f"{_OPTIMIZER}{{}}.exp_avg_sq"):
            if (tensor := tensors.pop(form.format(name), None)) is not None:
                divided.setdefault(form, {})[name] = tensor
    return divided


def write(
    path: Path,
    tensors: dict[str, torch.Tensor],
    config: LMConfig,
    facts: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    together: bool = False,
) -> None:
    """Write a checkpoint to ``path``, replacing an existing one and its shards.

    Args:
        path: The file.
        tensors: The tensors of :func:`collect_tensors`.
        config: Sizes of the model.
        facts: JSON values for the header: train, data, position, step, tokens.
        tokenizer: Tokenizer of text; None for a task.
        together: Whether all processes call this and write shards beside ``path``; the folder must
            be on a disk that all of them see.

    Raises:
        BackendUnavailable: safetensors is not installed.
        OSError: Writing failed; the old file and its shards are unchanged.
    """
    header = {"config": config.to_dict(), "facts": dict(facts)}
    if tokenizer is not None:
        header["tokenizer"] = tokenizer.to_dict()

    def commit(own: Mapping[str, torch.Tensor], index: shards.Index) -> None:
        own = {name: t.cpu().contiguous().clone() for name, t in own.items()}
        own |= {f"{_RANDOM}{name}": state for name, state in random_state().items()}
        values = {name: dataclasses.asdict(entry) for name, entry in index.items()}
        safetensors_io.write(path, FORMAT, own, header | {"shards": values}, force=True)
        # Until here the old checkpoint was whole, from here the new one is.
        remove_shards(path.parent, {chunk.file for e in index.values() for chunk in e.chunks})

    if together:
        shards.save(path.parent, tensors, lambda index: commit({}, index))
    else:
        commit(tensors, {})


def read(path: str | Path, rank: int = 0, size: int = 1) -> Checkpoint:
    """Read a checkpoint from a file, or from the folder of a run; never unpickles.

    Args:
        path: The file or the folder.
        rank: Index of this process among those that read the checkpoint together.
        size: Number of these processes; each checks the digests of its share of the files.

    Raises:
        BackendUnavailable: safetensors is not installed.
        InvalidInput: A file cannot be read, is not a language model's checkpoint, or was altered
            since it was written; the message names the fields.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    with safetensors_io.opened(path, FORMAT) as file:
        header = file.facts
        missing = [f"facts.{name}" for name in _FACTS if name not in header["facts"]]
        if missing:
            raise InvalidInput(f"{path} lacks {', '.join(missing)}; train again")
        index = {name: shards.Entry.of(values) for name, values in header["shards"].items()}
        files = {chunk.file for entry in index.values() for chunk in entry.chunks}
        index |= {name: shards.Entry.of_file(file, name) for name in file.names}
        config = LMConfig.from_dict(header["config"])
    if absent := sorted(name for name in files if not (path.parent / name).is_file()):
        raise InvalidInput(
            f"{path} needs {', '.join(absent)} beside it; put back all files of the checkpoint"
        )
    kinds = {path.name: FORMAT} | dict.fromkeys(files, shards.FORMAT)
    for name in sorted(kinds)[rank::size]:
        with safetensors_io.opened(path.parent / name, kinds[name]) as file:
            for tensor in file.names:
                file.tensor(tensor)
    return Checkpoint(path, config, dict(header["facts"]), header.get("tokenizer"), index)


def random_state() -> dict[str, torch.Tensor]:
    """Return PyTorch's random states of the CPU and of this process's GPU, as bytes."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: Mapping[str, torch.Tensor]) -> None:
    """Restore the states of :func:`random_state`; a GPU's state is ignored without a GPU."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
