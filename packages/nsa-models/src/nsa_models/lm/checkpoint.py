"""Checkpoints: one safetensors file with the model, the optimizer and the random states, and JSON
for all the rest.

Never a pickle; written whole or not at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nsa_core.errors import InvalidInput
from nsa_core.util import safetensors_io
from nsa_core.util.text import describe_error
from nsa_models.lm.config import LMConfig
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.parallel import load_whole, share_of, whole
from nsa_models.lm.tokens import Tokenizer, tokenizer_from_dict

FORMAT = "nsa-language-model 1"
FILE = "checkpoint.safetensors"
_MODEL, _OPTIMIZER, _RANDOM = "model.", "optimizer.", "random."


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint as it was read, on the CPU."""

    path: Path
    config: LMConfig
    facts: dict[str, Any]  # JSON beside the tensors: train, data, position, step, tokens
    tokenizer: dict[str, str] | None
    tensors: dict[str, torch.Tensor]

    def model(self, backends: str | Mapping[str, str] | None = None) -> LanguageModel:
        """The model, on the CPU.

        Raises:
            InvalidInput: the tensors are not those of the configuration.
        """
        model = LanguageModel(self.config, backends)
        state = self._of(_MODEL)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise InvalidInput(f"{self.path}: {describe_error(error)}") from error
        return model

    def text(self) -> Tokenizer | None:
        """The tokenizer; None where the model was trained on a task."""
        return None if self.tokenizer is None else tokenizer_from_dict(self.tokenizer)

    def restore(self, model: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
        """Put parameters, moments and random states back; every process has to call this."""
        load_whole(model, self._of(_MODEL))
        state = self._of(_OPTIMIZER)
        for name, parameter in (
            model.named_parameters() if state else ()
        ):  # none before the first step
            kept = optimizer.state[parameter]
            for key in ("exp_avg", "exp_avg_sq"):
                kept[key] = share_of(state[f"{name}.{key}"], parameter)
            step = state[f"{name}.step"]
            fused = any(group.get("fused") for group in optimizer.param_groups)
            kept["step"] = step.to(parameter.device) if fused else step
        set_random_state(self._of(_RANDOM))

    def _of(self, prefix: str) -> dict[str, torch.Tensor]:
        return {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}


def gathered(model: LanguageModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything a checkpoint holds as tensors, whole and on the CPU; every process has to call
    this.
    """
    found = {f"{_RANDOM}{name}": state for name, state in random_state().items()}
    for name, parameter in model.named_parameters():
        found[f"{_MODEL}{name}"] = whole(parameter)
        # What FSDP gathers for a forward are other parameters than those that it trains.
        assert parameter in optimizer.state or not optimizer.state, (
            f"{name} is not what the optimizer has"
        )
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{_OPTIMIZER}{name}.{key}"] = whole(value)
    return {name: tensor.cpu().contiguous().clone() for name, tensor in found.items()}


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    config: LMConfig,
    facts: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> None:
    """Replace the checkpoint at ``path``.

    Raises:
        BackendUnavailable: safetensors is not installed.
        OSError: the system refuses; the old file is as it was.
    """
    header = {"config": config.to_dict(), "facts": dict(facts)}
    if tokenizer is not None:
        header["tokenizer"] = tokenizer.to_dict()
    safetensors_io.write(path, FORMAT, tensors, header, force=True)


def read(path: str | Path) -> Checkpoint:
    """The checkpoint in a file, or in the folder of a run. Never unpickles.

    Raises:
        BackendUnavailable: safetensors is not installed.
        InvalidInput: the file cannot be read, or is no such checkpoint.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    with safetensors_io.reading(path, FORMAT) as (header, tensors):
        config = LMConfig.from_dict(header["config"])
        return Checkpoint(path, config, dict(header["facts"]), header.get("tokenizer"), tensors)


def random_state() -> dict[str, torch.Tensor]:
    """PyTorch's random states, of the CPU and of this process's GPU, as bytes."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random_state(states: Mapping[str, torch.Tensor]) -> None:
    """Inverse of :func:`random_state`; a GPU's state is left out where there is no GPU."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
