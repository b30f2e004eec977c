"""The first training stage of a converted model: phi and the gates, with all else frozen."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from nsa_core.dtypes import dtype_name
from nsa_core.errors import InvalidInput
from nsa_core.limits import integer_problems
from nsa_models.hf.attention import NSASelfAttention
from nsa_models.lm.mass import Mass, layer_mass, measured_rows

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class StageProgress(NamedTuple):
    """The state of the first stage after a step.

    Attributes:
        step: Number of updates so far.
        loss: Mean loss of the step in nats per token; NaN before the first step.
        selected_mass: Mean over the layers of the share of dense attention's probability inside the
            selected blocks; None if it was not measured after this step.
        random_mass: The same if the blocks that are not always selected were chosen at random; None
            like ``selected_mass``.
    """

    step: int
    loss: float
    selected_mass: float | None = None
    random_mass: float | None = None


def train_new_parameters(
    model: Any,
    batches: Iterable[torch.Tensor],
    *,
    learning_rate: float = 1e-3,
    measure: torch.Tensor | None = None,
    measure_every: int = 50,
) -> Iterator[StageProgress]:
    """Train phi and the gates of a converted model on the user's tokens, with all else frozen.

    The model learns the next token with AdamW. Consume the iterator to train:
    ``for progress in train_new_parameters(...): print(progress)``. When it ends, or is closed, the
    other parameters require a gradient again as before.

    Args:
        model: A model with NSA, for example from :func:`nsa_models.hf.convert`.
        batches: Token batches, integer [B, S] with S >= 2, one per step, on any device.
        learning_rate: The learning rate of AdamW.
        measure: Integer [T], a text on which :func:`selected_mass` is measured; None: never.
        measure_every: Number of steps between two measurements. The first is before training, and
            one is after the last step.

    Yields:
        The progress: before training if ``measure`` is given, and after every step.

    Raises:
        InvalidInput: The model has no NSA layer, a number is out of range, or a batch is not an
            integer tensor [B, S] with S >= 2.
    """
    problems = integer_problems("measure_every", measure_every)
    if not 0 < learning_rate < math.inf:
        problems.append(f"learning_rate must be finite and > 0, got {learning_rate!r}")
    if problems:
        raise InvalidInput("; ".join(problems))
    parameters = new_parameters(model)
    if measure is not None:
        yield _measured(model, measure, StageProgress(0, float("nan")))
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    progress = None
    with _only_trainable(model, parameters):
        for step, batch in enumerate(batches, 1):
            tokens = _checked_tokens(f"batch {step} of batches", batch, "BS", 2)
            model.train()
            tokens = tokens.to(model.device)
            with torch.enable_grad():
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            progress = StageProgress(step, float(loss.detach()))
            if measure is not None and step % measure_every == 0:
                progress = _measured(model, measure, progress)
            yield progress
        if measure is not None and progress is not None and progress.selected_mass is None:
            yield _measured(model, measure, progress)


def new_parameters(model: Any) -> list[torch.nn.Parameter]:
    """Return the parameters that a dense model does not have: those of phi and of the gates.

    Raises:
        InvalidInput: The model has no NSA layer.
    """
    return [
        parameter
        for layer in _layers(model)
        for part in (layer.phi_k, layer.phi_v, layer.gate)
        for parameter in part.parameters()
    ]


def _layers(model: Any) -> list[NSASelfAttention]:
    layers = [module for module in model.modules() if isinstance(module, NSASelfAttention)]
    if not layers:
        raise InvalidInput(
            f"model must have NSA layers, got {type(model).__name__}; convert a dense model with"
            " nsa_models.hf.convert(model)"
        )
    return layers


@contextlib.contextmanager
def _only_trainable(model: Any, parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """Let only ``parameters`` require a gradient inside the block."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    was_training = model.training
    model.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
        model.train(was_training)


def _checked_tokens(name: str, tokens: Any, axes: str, least: int) -> torch.Tensor:
    """Return ``tokens`` as int64; they must be integers with ``axes``, such as "BS" for [B, S].

    Raises:
        InvalidInput: They are not, or the last axis has fewer than ``least`` tokens.
    """
    passed = type(tokens).__name__
    if isinstance(tokens, torch.Tensor):
        passed = f"{list(tokens.shape)} {dtype_name(tokens.dtype)}"
        has_rows = tokens.dim() == len(axes) and tokens.shape[-1] >= least
        if has_rows and tokens.dtype in _INTEGERS:
            return tokens.long()
    raise InvalidInput(
        f"{name} must be an integer tensor [{', '.join(axes)}] with {axes[-1]} >= {least},"
        f" got {passed}"
    )


def _measured(model: Any, tokens: torch.Tensor, progress: StageProgress) -> StageProgress:
    masses = selected_mass(model, tokens)
    return progress._replace(
        selected_mass=statistics.fmean(mass.selected for mass in masses),
        random_mass=statistics.fmean(mass.random for mass in masses),
    )


@torch.no_grad()
def selected_mass(model: Any, tokens: torch.Tensor, rows: int = 256) -> list[Mass]:
    """Measure the share of dense attention's probability inside the selected blocks.

    Args:
        model: A model with NSA.
        tokens: Integer [T], one document.
        rows: Maximum number of query rows, spread evenly over the tokens.

    Returns:
        One entry per layer; see :class:`nsa_models.lm.mass.Mass`.

    Raises:
        InvalidInput: The model has no NSA layer, ``tokens`` is no integer tensor [T], or the text
            is not longer than the blocks that a token selects.
    """
    layers = _layers(model)
    tokens = _checked_tokens("tokens", tokens, "T", 1)
    inputs: dict[int, torch.Tensor] = {}

    def keep_input(layer: Any, args: Any, options: dict[str, Any]) -> None:
        inputs[layer.layer_idx] = options["hidden_states"][0]

    hooks = [layer.register_forward_pre_hook(keep_input, with_kwargs=True) for layer in layers]
    was_training = model.training
    try:
        model.eval()
        model(input_ids=tokens[None].to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    masses = []
    for layer in layers:
        x = inputs.pop(layer.layer_idx)
        cu_seqlens = torch.tensor([0, len(tokens)], dtype=torch.int32, device=x.device)
        query_rows = measured_rows(layer.config, cu_seqlens, len(tokens), rows)
        masses.append(layer_mass(layer, x, cu_seqlens, len(tokens), query_rows))
    return masses
