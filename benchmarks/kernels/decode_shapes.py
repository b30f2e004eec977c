"""The shapes of the decode steps that triton_decode.py times, and their tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from nsa_backend_triton.decode import append as decode_append
from nsa_backend_triton.decode import forms
from nsa_core.contract import BlockTables, DecodeCall
from nsa_core.layout import BlockGeometry


@dataclasses.dataclass(frozen=True)
class Shape:
    """A step over ``batch`` sequences of ``length`` tokens, ``new_tokens`` of them new.

    The cache has pages of ``page`` tokens.
    """

    batch: int
    length: int
    heads: int
    groups: int
    dk: int
    dv: int
    page: int = 128
    new_tokens: int = 1
    geometry: BlockGeometry = dataclasses.field(default_factory=BlockGeometry)

    def __str__(self) -> str:
        new = f" m={self.new_tokens}" if self.new_tokens > 1 else ""
        return f"B={self.batch} S={self.length} {self.heads}/{self.groups}/{self.dk}/{self.dv}{new}"

    def bytes_read(self, itemsize: int) -> dict[str, int]:
        """Return the bytes of K and V that each branch must read once for the last token."""
        g = self.geometry
        blocks = min(g.num_selected_blocks, g.num_select_blocks(self.length))
        selected = (blocks - 1) * g.select_block_size + (self.length - 1) % g.select_block_size + 1
        rows = {
            "cmp": g.num_compressed(self.length),
            "sel": selected,
            "win": min(g.window_size, self.length),
        }
        bytes_per_row = self.batch * self.groups * (self.dk + self.dv) * itemsize
        return {name: count * bytes_per_row for name, count in rows.items()}


ANCHORS = [
    Shape(32, 65536, 64, 4, 128, 128),
    Shape(256, 8192, 64, 4, 128, 128),
    Shape(16, 131072, 64, 4, 128, 128),
    Shape(1, 2048, 8, 2, 32, 32, page=2048),
    Shape(1, 65536, 64, 4, 128, 128),
    Shape(32, 65536, 64, 4, 128, 128, new_tokens=4),
]


@dataclasses.dataclass(frozen=True)
class Data:
    """The tensors of a step, and the rows that its append writes."""

    shape: Shape
    q: torch.Tensor
    gates: torch.Tensor
    stores: dict[str, tuple[torch.Tensor, torch.Tensor]]
    new_rows: tuple[torch.Tensor, torch.Tensor]
    rope: tuple[torch.Tensor, torch.Tensor]
    call: DecodeCall

    def step(self, settings: Any = (None, None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the fused step."""
        s = self.stores
        return forms.step(
            self.q, self.gates, *s["cmp"], *s["sel"], *s["win"], call=self.call, settings=settings
        )

    def append(self) -> torch.Tensor:
        """Run the append; it writes the same bytes to the same rows every time."""
        k, v = self.new_rows
        s = self.stores
        return decode_append.append(
            self.q,
            (k, k, k),
            (v, v, v),
            s["raw"],
            s["sel"],
            s["win"],
            rope=self.rope,
            rotate_raw=False,
            call=self.call,
        )


def make(shape: Shape, device: str, dtype: torch.dtype) -> Data:
    """Return a step over random numbers, with pages in random order."""
    generator = torch.Generator(device).manual_seed(shape.length)
    g, groups, m = shape.geometry, shape.groups, shape.new_tokens

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    pages = -(-shape.length // shape.page)
    total, ring = shape.batch * pages, g.window_size + m - 1
    sizes = {
        "cmp": (total, shape.page // g.compress_stride),
        "sel": (total, shape.page),
        "win": (shape.batch, ring),
        "raw": (shape.batch, g.compress_block_size + m),
    }
    stores = {
        n: (random(*size, groups, shape.dk), random(*size, groups, shape.dv))
        for n, size in sizes.items()
    }
    block_table = (
        torch.randperm(total, generator=generator, device=device).view(shape.batch, pages).int()
    )
    lengths = torch.full((shape.batch,), shape.length, dtype=torch.int32, device=device)
    rings = torch.arange(shape.batch, dtype=torch.int32, device=device)[:, None]
    tables = BlockTables(block_table, block_table, rings, rings)
    call = DecodeCall(g, shape.dk**-0.5, lengths - m, lengths, tables, shape.length)
    angles = torch.rand((shape.length + m, shape.dk // 2), generator=generator, device=device)
    return Data(
        shape,
        random(shape.batch, m, shape.heads, shape.dk),
        torch.rand((shape.batch, m, shape.heads, 3), generator=generator, device=device),
        stores,
        (random(shape.batch, m, groups, shape.dk), random(shape.batch, m, groups, shape.dv)),
        (angles.cos(), angles.sin()),
        call,
    )
