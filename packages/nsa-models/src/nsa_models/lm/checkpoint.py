"""Checkpoints: one safetensors file with the model, the optimizer and the random states.

All other facts are JSON in the file's header. A checkpoint is never a pickle and is written
atomically.
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
from nsa_models.lm.parallel import load_unsharded, shard_like, unshard
from nsa_models.lm.run_folder import CHECKPOINT
from nsa_models.lm.tokens import Tokenizer, tokenizer_from_dict

FORMAT = "nsa-language-model 2"
FILE = CHECKPOINT
_FACTS = ("train", "data", "position", "step", "tokens")
_MODEL, _OPTIMIZER, _RANDOM = "model.", "optimizer.", "random."


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint read from a file; its tensors are on the CPU."""

    path: Path
    config: LMConfig
    facts: dict[str, Any]  # JSON of the header: train, data, position, step, tokens
    tokenizer: dict[str, str] | None
    tensors: dict[str, torch.Tensor]

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

    def restore(self, model: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
        """Restore parameters, optimizer moments and random states; every process must call this."""
        load_unsharded(model, self._with_prefix(_MODEL))
        state = self._with_prefix(_OPTIMIZER)
        # The optimizer has no state before the first step.
        for name, parameter in model.named_parameters() if state else ():
            moments = optimizer.state[parameter]
            for key in ("exp_avg", "exp_avg_sq"):
                moments[key] = shard_like(state[f"{name}.{key}"], parameter)
            step = state[f"{name}.step"]
            fused = any(group.get("fused") for group in optimizer.param_groups)
            moments["step"] = step.to(parameter.device) if fused else step
        set_random_state(self._with_prefix(_RANDOM))

    def _with_prefix(self, prefix: str) -> dict[str, torch.Tensor]:
        return {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}


def collect_tensors(
    model: LanguageModel, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Collect a checkpoint's tensors, unsharded and on the CPU; every process must call this."""
    tensors = {f"{_RANDOM}{name}": state for name, state in random_state().items()}
    for name, parameter in model.named_parameters():
        tensors[f"{_MODEL}{name}"] = unshard(parameter)
        # During a forward FSDP shows gathered parameters, which are not those that it trains.
        assert parameter in optimizer.state or not optimizer.state, (
            f"{name} is not a parameter of the optimizer; reshard the model first"
        )
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{_OPTIMIZER}{name}.{key}"] = unshard(value)
    return {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    config: LMConfig,
    facts: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> None:
    """Write a checkpoint to ``path``, replacing an existing one.

    Args:
        path: The file.
        tensors: The tensors of :func:`collect_tensors`.
        config: Sizes of the model.
        facts: JSON values for the header: train, data, position, step, tokens.
        tokenizer: Tokenizer of text; None for a task.

    Raises:
        BackendUnavailable: safetensors is not installed.
        OSError: Writing failed; the old file is unchanged.
    """
    header = {"config": config.to_dict(), "facts": dict(facts)}
    if tokenizer is not None:
        header["tokenizer"] = tokenizer.to_dict()
    safetensors_io.write(path, FORMAT, tensors, header, force=True)


def read(path: str | Path) -> Checkpoint:
    """Read a checkpoint from a file, or from the folder of a run; never unpickles.

    Raises:
        BackendUnavailable: safetensors is not installed.
        InvalidInput: The file cannot be read, is not a language model's checkpoint, or was altered
            since it was written; the message names the fields.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    with safetensors_io.reading(path, FORMAT) as (header, tensors):
        missing = [f"facts.{name}" for name in _FACTS if name not in header["facts"]]
        if missing:
            raise InvalidInput(f"{path} lacks {', '.join(missing)}; train again")
        config = LMConfig.from_dict(header["config"])
        return Checkpoint(path, config, dict(header["facts"]), header.get("tokenizer"), tensors)


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
