"""LMConfig: the validated sizes of a small decoder language model, and the named sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.limits import integer_problems, shown

ATTENTION = ("nsa", "dense")
# A cache allocates these numbers of rows and a selection this number of blocks per token, whatever
# the length of the text. Without limits, a few bytes of config.json would take all memory.
_LARGEST = {"window_size": 2**20, "select_block_size": 2**16, "num_selected_blocks": 2**12}


def memory_problems(layer: NSAConfig) -> list[str]:
    """Return a sentence for each size for which a cache or a selection would be too large."""
    return [
        f"{name} must be <= {largest:,}, got {number:,}"
        for name, largest in _LARGEST.items()
        if (number := getattr(layer, name)) > largest
    ]


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """A decoder of pre-norm blocks (attention, then SwiGLU).

    Args:
        layer: Width, heads and NSA sizes. With ``attention="dense"`` only its heads, rotary
            embedding, q/k norm and scale are used.
        n_layers: Number of blocks.
        vocab_size: Number of token ids.
        mlp_dim: Hidden units of SwiGLU. The default is 8/3 of the width, rounded up to a multiple
            of 64: about as many parameters as an ungated MLP of 4 x width.
        attention: "nsa" or "dense".
        norm_eps: The constant in all RMS norms.
        qkv_bias: Whether the projections to queries, keys and values have a bias.
        out_bias: Whether the output projection has a bias.
        tied: Whether the output embedding is the input embedding.
        nsa_layers: With ``attention="nsa"``, the numbers of the blocks with NSA; all others have
            dense attention. None, or all numbers: all blocks have NSA.

    Raises:
        InvalidInput: A field is out of range; the message names every such field and its value.
    """

    layer: NSAConfig
    n_layers: int
    vocab_size: int = 256
    mlp_dim: int | None = None
    attention: str = "nsa"
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    out_bias: bool = False
    tied: bool = True
    nsa_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        errors: list[str] = []
        if not isinstance(self.layer, NSAConfig):
            errors.append(f"layer must be an NSAConfig, got {type(self.layer).__name__}")
        else:
            errors += memory_problems(self.layer)
            if self.mlp_dim is None:
                object.__setattr__(self, "mlp_dim", -(-8 * self.layer.dim // 3 // 64) * 64)
        for name, minimum in (("n_layers", 1), ("vocab_size", 2), ("mlp_dim", 1)):
            # The default of mlp_dim needs a valid layer.
            optional = name == "mlp_dim"
            errors += integer_problems(name, getattr(self, name), minimum, optional=optional)
        if self.attention not in ATTENTION:
            errors.append(
                f"attention must be one of {', '.join(ATTENTION)}, got {self.attention!r}"
            )
        if not (isinstance(self.norm_eps, float) and 0 < self.norm_eps < 1):
            errors.append(f"norm_eps must be a number > 0 and < 1, got {self.norm_eps!r}")
        if self.nsa_layers is not None and self.attention != "nsa":
            errors.append(f"nsa_layers must be None with attention {self.attention!r}")
        if errors:
            raise InvalidInput("; ".join(errors))
        if self.nsa_layers is not None:
            numbers = tuple(layers_with_nsa(self.nsa_layers, self.n_layers))
            object.__setattr__(
                self, "nsa_layers", None if len(numbers) == self.n_layers else numbers
            )

    def attention_of(self, number: int) -> str:
        """Return "nsa" or "dense" for a block."""
        if self.nsa_layers is None:
            return self.attention
        return "nsa" if number in self.nsa_layers else "dense"

    @property
    def hidden(self) -> int:
        """Return the hidden units of SwiGLU."""
        assert self.mlp_dim is not None  # set in __post_init__
        return self.mlp_dim


def layers_with_nsa(nsa_layers: Any, n_layers: int) -> list[int]:
    """Return the numbers of the layers with NSA, in ascending order.

    Args:
        nsa_layers: Numbers from 0; "all" or None; "every_4th_dense", which keeps layers 3, 7, 11
            and so on dense; or a function that returns for a number whether the layer has NSA.
        n_layers: Number of layers of the model.

    Raises:
        InvalidInput: It is of another kind, has no layer or one twice, or a number is out of range.
    """
    numbers, chosen = range(n_layers), nsa_layers
    if nsa_layers is None or nsa_layers == "all":
        chosen = list(numbers)
    elif nsa_layers == "every_4th_dense":
        chosen = [number for number in numbers if number % 4 != 3]
        if n_layers < 4:
            raise InvalidInput(
                f"nsa_layers must be 'all' or a list of layer numbers for a model of {n_layers}"
                " layers, got 'every_4th_dense', which needs 4"
            )
    elif callable(nsa_layers):
        chosen = [number for number in numbers if nsa_layers(number)]
    is_list = isinstance(chosen, (list, tuple)) and all(type(number) is int for number in chosen)
    if not (is_list and chosen and all(number in numbers for number in chosen)) or (
        len(set(chosen)) < len(chosen)
    ):
        passed = "a function that chooses none" if callable(nsa_layers) else shown(nsa_layers)
        raise InvalidInput(
            "nsa_layers must be 'all', 'every_4th_dense' or a list of one or more different layer"
            f" numbers from 0 to {n_layers - 1}, got {passed}"
        )
    return sorted(chosen)


def check_layer(layer: int | None, numbers: Sequence[int]) -> None:
    """Check that a model has this layer, where ``numbers`` are those of its layers with NSA.

    Raises:
        InvalidInput: It does not.
    """
    if layer is not None and layer not in numbers:
        choices = f"0 to {len(numbers) - 1}"
        if numbers[-1] >= len(numbers):
            choices = f"{' or '.join(map(str, numbers))}, a layer with NSA"
        raise InvalidInput(f"layer must be {choices}, got {layer}")


def _small(dim: int, heads: int, window: int) -> NSAConfig:
    return NSAConfig(
        dim=dim,
        n_heads=heads,
        n_kv_heads=heads // 2,
        compress_block_size=8,
        compress_stride=4,
        select_block_size=16,
        num_selected_blocks=4,
        window_size=window,
    )


SIZES = {
    # Trains on two CPU cores in minutes. A row of 256 tokens has as many blocks as a row of 4k
    # tokens in the large sizes.
    "tiny": LMConfig(_small(128, 4, 32), n_layers=2),
    # One layer of width 128 at the paper's sizes: row 10 of tests/verify/report_rows/README.md.
    "toy": LMConfig(NSAConfig(dim=128, n_heads=8, n_kv_heads=2), n_layers=1),
    "m7c_125m": LMConfig(NSAConfig(dim=768, n_heads=12, n_kv_heads=2, head_dim=64), n_layers=12),
}


def size(name: str, **changes: Any) -> LMConfig:
    """Return the configuration named ``name``, with fields replaced by ``changes``.

    Raises:
        InvalidInput: The name is unknown; the message lists the names.
    """
    if name not in SIZES:
        raise InvalidInput(f"size must be one of {', '.join(SIZES)}, got {name!r}")
    return dataclasses.replace(SIZES[name], **changes)
