"""cos and sin of the rotary angles; one operator under torch.compile."""

from __future__ import annotations

import torch


def _table(
    positions: torch.Tensor, dim: int, base: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    exponents = torch.arange(0, dim, 2, device=positions.device).to(dtype) / dim
    angles = positions.to(dtype)[:, None, None] * torch.pow(base, -exponents)
    return angles.cos(), angles.sin()


def _table_fake(
    positions: torch.Tensor, dim: int, base: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (positions.shape[0], 1, (dim + 1) // 2)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


# Without an operator, torch.compile fuses the table into every product with it, and computes
# powers, sines and cosines once per element of q. For 16k tokens of 12 heads on an H200 that takes
# twice 220 us per layer instead of 12 us.
_lib = torch.library.Library("nsa_core", "DEF")
_lib.define(
    "rope_table(Tensor positions, int dim, float base, ScalarType dtype) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_lib.impl("rope_table", _table, "CompositeExplicitAutograd")
torch.library.register_fake("nsa_core::rope_table", _table_fake, lib=_lib)


def cos_sin(
    positions: torch.Tensor,  # integer [R]
    dim: int,
    base: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [R, 1, dim / 2] of position * base^(-2i/dim), in ``dtype``."""
    table = torch.ops.nsa_core.rope_table.default if torch.compiler.is_compiling() else _table
    return table(positions, dim, base, dtype)
