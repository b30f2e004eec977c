"""Run a model over a text and record what its NSA layers select."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.layer.gating import compute_gates
from nsa_core.layer.module import NSAttention
from nsa_core.packing import token_positions
from nsa_models.inspect.spans import TextSpan, split_text
from nsa_models.lm.mass import (
    ROWS_AT_ONCE,
    RowMass,
    block_kinds,
    row_mass,
    select_blocks,
    selection_mask,
)
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.tokens import Tokenizer

# The kinds of a cell of LayerInspection.cells.
FUTURE, PASSED_OVER, MISSED, FORCED, CHOSEN = range(5)


@dataclasses.dataclass(frozen=True)
class LayerInspection:
    """What one layer does with each of S tokens; all tensors are on the CPU.

    Attributes:
        name: Name of the layer in the model, such as "blocks.0.attn".
        number: Number of the layer in the model, from :func:`layer_numbers`.
        config: Sizes of the layer.
        blocks: int32 [S, G, n], the selected blocks, ascending, padded with -1.
        gates: fp32 [S, Hq, 3], in the order cmp, sel, win.
        mass: Shares of dense attention's probability, a row per token; see
            :class:`nsa_models.lm.mass.RowMass`.
    """

    name: str
    number: int
    config: NSAConfig
    blocks: torch.Tensor
    gates: torch.Tensor
    mass: RowMass

    @property
    def first_choice(self) -> int:
        """Position of the first query that has more blocks than it selects."""
        return self.config.num_selected_blocks * self.config.select_block_size

    def cells(self) -> torch.Tensor:
        """Return the kind of each (block, query) pair.

        Returns:
            uint8 [G, C, S]: FUTURE for a block after the query; CHOSEN for a selected block that is
            not forced; FORCED; MISSED for a block that is not selected, but is among the blocks
            that hold most of dense attention's probability; else PASSED_OVER.
        """
        count = self.mass.blocks.shape[-1]
        forced, free = block_kinds(self.config, torch.arange(len(self.blocks)), count)
        chosen = selection_mask(self.blocks, count)
        cells = torch.zeros(chosen.shape, dtype=torch.uint8)
        cells[(forced | free).expand_as(chosen)] = PASSED_OVER
        cells[self.mass.best_blocks & ~chosen] = MISSED
        cells[chosen & free] = CHOSEN
        cells[chosen & forced] = FORCED
        return cells.permute(1, 2, 0)

    def group_gates(self) -> torch.Tensor:
        """Return the gates averaged over the query heads of each kv head, fp32 [S, G, 3]."""
        gates: torch.Tensor = self.gates.unflatten(1, (self.config.n_kv_heads, -1)).mean(2)
        return gates


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A model's selections over one text.

    Attributes:
        tokens: int64 [S], the tokens that the model read.
        spans: The same tokens as text.
        layers: What each layer does, in the order of the forward pass.
        source: Name of the text.
        weights: Description of the weights, such as "untrained weights, seed 0".
        trained: Whether the weights were trained.
        total_tokens: Tokens of the whole text; more than S if it was cut.
    """

    tokens: torch.Tensor
    spans: tuple[TextSpan, ...]
    layers: tuple[LayerInspection, ...]
    source: str
    weights: str
    trained: bool
    total_tokens: int


def inspect_model(
    model: nn.Module,
    tokens: torch.Tensor,
    tokenizer: Tokenizer | None = None,
    *,
    source: str = "text",
    weights: str = "a model",
    trained: bool = True,
    total_tokens: int | None = None,
) -> Inspection:
    """Run a model over tokens and record the selection of every NSA layer.

    Args:
        model: Any module with :class:`nsa_core.NSAttention` layers whose ``model(tokens)`` takes
            tokens [1, S]. It runs in eval mode and without gradient.
        tokens: Integer [S], on any device.
        tokenizer: Decodes the tokens; None shows their ids.
        source: Name of the text, for titles.
        weights: Description of the weights, for titles.
        trained: Whether the weights were trained; pictures of others carry a warning.
        total_tokens: Tokens of the whole text, if ``tokens`` were cut from it.

    Returns:
        The selections, gates and shares of dense attention's probability.

    Raises:
        InvalidInput: The model has no NSA layer; tokens are not integers [S], lie outside the
            vocabulary, or are too few for any layer to have a choice.
        Unsupported: No backend supports the request.

    Example:
        >>> inspection = inspect_model(model, torch.randint(256, (512,)))
        >>> inspection.layers[0].blocks.shape
        torch.Size([512, 2, 4])
    """
    numbers = layer_numbers(model)
    if not numbers:
        kind = f"{type(model).__name__} without an NSAttention layer"
        if isinstance(model, LanguageModel):
            kind = f"attention {model.config.attention!r}"
        raise InvalidInput(
            f"model must have NSA layers, got {kind}, which selects no blocks; give a model with"
            " attention 'nsa'"
        )
    layers = {n: m for n, m in model.named_modules() if n in numbers}
    _check_tokens(model, tokens, layers, total_tokens)
    records: list[LayerInspection] = []
    names = {layer: name for name, layer in layers.items()}

    def record(attn: NSAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, name = args[0] if args else kwargs["x"], names[attn]
        records.append(_inspect_layer(attn, x, name, numbers[name]))

    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in names]
    was_training, device = model.training, next(model.parameters()).device
    try:
        with torch.no_grad():
            model.eval()(tokens[None].to(device))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return Inspection(
        tokens.cpu().long(),
        split_text(tokenizer, tokens.tolist()),
        tuple(records),
        source,
        weights,
        trained,
        len(tokens) if total_tokens is None else total_tokens,
    )


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Return the number of each layer with NSA, by its name in the model.

    It is the first number in the name, which counts dense layers too; or the position among the
    layers with NSA, if these numbers do not ascend.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, NSAttention)]
    numbers = [next((int(p) for p in n.split(".") if p.isdecimal()), -1) for n in names]
    if numbers != sorted({*numbers} - {-1}):
        numbers = list(range(len(names)))
    return dict(zip(names, numbers))


def _inspect_layer(attn: NSAttention, x: torch.Tensor, name: str, number: int) -> LayerInspection:
    """Return what a layer does with its input x [1, S, dim]."""
    projected, blocks = select_blocks(attn, x)
    length, device = blocks.shape[1], blocks.device
    positions = token_positions(torch.tensor([0, length], device=device), length)
    assert projected.k[1] is not None  # k[1] belongs to sel
    chunks = [
        row_mass(attn.config, projected.q[0], projected.k[1][0], blocks[0], positions, rows)
        for rows in torch.arange(length, device=device).split(ROWS_AT_ONCE)
    ]
    mass = RowMass(*(torch.cat(parts).cpu() for parts in zip(*chunks)))
    gates = compute_gates(attn.gate, x)[0].float().cpu()
    return LayerInspection(name, number, attn.config, blocks[0].cpu(), gates, mass)


def _check_tokens(
    model: nn.Module,
    tokens: torch.Tensor,
    layers: dict[str, NSAttention],
    total_tokens: int | None,
) -> None:
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise InvalidInput(
            f"tokens must be integers [S], got {tokens.dtype} {list(tokens.shape)}; pass the"
            " tokens of one text"
        )
    config = min(
        (layer.config for layer in layers.values()),
        key=lambda c: c.num_selected_blocks * c.select_block_size,
    )
    blocks, size = config.num_selected_blocks, config.select_block_size
    selected = blocks * size
    if len(tokens) <= selected:
        total = len(tokens) if total_tokens is None else total_tokens
        reason = (
            f"each query selects {blocks} blocks of {size} tokens, so fewer tokens leave no choice"
        )
        if total > selected:
            raise InvalidInput(
                f"max_tokens must be more than {selected:,}, got {len(tokens):,}: {reason};"
                f" the text has {total:,} tokens"
            )
        raise InvalidInput(
            f"the text must have more than {selected:,} tokens, got {total:,}: {reason}; give"
            " more text"
        )
    if isinstance(model, LanguageModel) and int(tokens.max()) >= model.config.vocab_size:
        raise InvalidInput(
            f"tokens must lie in [0, {model.config.vocab_size}), got {int(tokens.max())}"
        )
