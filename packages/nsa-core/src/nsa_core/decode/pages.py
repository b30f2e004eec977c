"""Pages of keys and values: where a token's row is, and how rows are read and written.

    token t of sequence s is row t % page of the page table[s, t // page % columns]

A table that covers a whole sequence never wraps around. A table of fewer columns does, and keeps
the newest columns * page tokens; with one column, a page is a ring.

Pages of torch.float8_e4m3fn or torch.int8 hold codes, with one scale a page and kv head:

    code = round(x / scale), at most 448 or 127 in magnitude        x = code * scale

The owner of a page sets its scales before its first token, and keeps them as long as it has tokens;
a larger number than they allow is saturated, and NaN is 0. Serving engines use static scales for
the same reasons: a code depends on its own token alone, so a prompt, its chunks, single steps,
shared prefixes and replays hold the same codes. A scale that followed the largest token of a page
would rewrite the tokens before, which other sequences and other programs of the same launch may
read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_core.config import is_finite
from nsa_core.contract import BlockTables, PageScales
from nsa_core.dtypes import QUANTIZED, as_bytes, dtype_name
from nsa_core.errors import InvalidInput
from nsa_core.limits import shown
from nsa_core.torch_ops.tensor_kinds import check_types


def kv_scale(x: torch.Tensor, kv_dtype: torch.dtype, margin: float = 1.0) -> torch.Tensor:
    """Return scales of quantized pages, from keys or values of a calibration run.

    Args:
        x: keys, rotated as in the pages, or values, [..., G, D].
        kv_dtype: torch.float8_e4m3fn or torch.int8.
        margin: the largest magnitude that does not saturate, in units of the largest one in x of
            the same head. It costs precision in int8, and hardly any in float8_e4m3fn.

    Returns:
        float32 [G].

    Raises:
        InvalidInput: x, kv_dtype or margin is invalid.

    Example:
        >>> import torch
        >>> from nsa_core import kv_scale
        >>> k, v = torch.randn(2, 1000, 4, 64)
        >>> scale = torch.stack([kv_scale(x, torch.int8, margin=1.2) for x in (k, v)], -1)
        >>> scales = scale.expand(100, -1, -1)  # of 100 pages
        >>> scales.shape
        torch.Size([100, 4, 2])
    """
    check_kv_dtype(kv_dtype)
    check_types({"x": x})
    if x.dim() < 2 or not x.numel():
        raise InvalidInput(f"x must be [..., G, D] with elements, got the shape {[*x.shape]}")
    if not (is_finite(margin) and margin > 0):
        raise InvalidInput(f"margin must be finite and > 0, got {shown(margin)}")
    largest = x.abs().float().movedim(-2, 0).flatten(1).amax(1)
    return largest.mul_(margin / QUANTIZED[kv_dtype]).clamp_(min=torch.finfo(torch.float32).tiny)


def check_kv_dtype(kv_dtype: object) -> None:
    """Check that ``kv_dtype`` is a dtype of quantized pages.

    Raises:
        InvalidInput: it is another dtype, or no dtype.
    """
    if not isinstance(kv_dtype, torch.dtype) or kv_dtype not in QUANTIZED:
        known = " or ".join(map(str, QUANTIZED))
        raise InvalidInput(f"kv_dtype must be {known}, got {kv_dtype!r}")


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the codes of x [..., G, D] for scales [..., G]."""
    limit = QUANTIZED[dtype]
    codes = (x.float() / scale[..., None]).clamp_(-limit, limit).nan_to_num_(0)
    return (codes if dtype.is_floating_point else codes.round_()).to(dtype)


class PagedKV(NamedTuple):
    """Keys and values of one branch in pages, and the block table that leads to them.

    Attributes:
        k: keys [P, page, G, Dk] of any strides but that of the last axis, for example a transposed
            [P, G, page, Dk].
        v: values [P, page, G, Dv], likewise.
        table: int32 [sequences, columns] on the device, indices of pages.
        scales: float32 [P, G, 2], the scales of keys and of values, contiguous but for the axis of
            pages, if k and v are torch.float8_e4m3fn or torch.int8; otherwise None.
            :func:`nsa_core.kv_scale` computes them; ``scales.expand(P, -1, -1)`` gives all pages
            the same ones.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """Tokens per page."""
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that the table has room for."""
        return self.table.shape[1] * self.rows

    def locate(
        self, tokens: torch.Tensor, sequences: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the page and the row of tokens, integers [B, m].

        Args:
            tokens: int64 [B, m], positions in their sequences.
            sequences: [B], the rows of the table; None means all of them. Nobody may have checked
                them, nor their pages: the result is inside the pool.
        """
        table = self.table
        if sequences is not None:
            table = table.index_select(0, sequences.clamp(0, len(table) - 1))
            table = table.clamp_(0, len(self.k) - 1)
        if table.shape[1] == 1:
            return table.expand_as(tokens), tokens % self.rows
        column = tokens // self.rows % table.shape[1]
        return table.gather(1, column), tokens % self.rows

    def read(
        self, tokens: torch.Tensor, sequences: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [B, m, G, D]; those of a token without a page are arbitrary.

        Codes are dequantized to float32.
        """
        page, row = self.locate(tokens, sequences)
        if self.scales is None:
            return self.k[page, row], self.v[page, row]
        k, v = (as_bytes(x)[page, row].view(x.dtype) for x in (self.k, self.v))
        k_scale, v_scale = self.scales[page][..., None].unbind(-2)
        return k.float() * k_scale, v.float() * v_scale

    def write(
        self,
        tokens: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        absent: torch.Tensor | None = None,
        sequences: torch.Tensor | None = None,
    ) -> None:
        """Write k and v [B, m, G, D] to the rows of tokens.

        The shapes of a write do not depend on values on the device. A row that is not written
        repeats the write of the first one that is; if there is none, it writes back what is there.

        Args:
            tokens: int64 [B, m], positions in their sequences.
            k: keys.
            v: values.
            absent: bool [B, m], the rows that are not written; None means none.
            sequences: as in :meth:`locate`.
        """
        if not tokens.numel():
            return
        page, row = self.locate(tokens, sequences)
        if absent is None:
            for i, (store, new) in enumerate(((self.k, k), (self.v, v))):
                as_bytes(store).index_put_((page, row), self._codes(i, new, page))
            return
        flat = absent.flatten()
        source = torch.arange(len(flat), device=flat.device)
        source = torch.where(flat, flat.to(torch.uint8).argmin(), source)
        page, row, none = page.flatten()[source], row.flatten()[source], flat.all()
        for i, (store, new) in enumerate(((self.k, k), (self.v, v))):
            codes = self._codes(i, new.flatten(0, 1)[source], page)
            rows = torch.where(none, as_bytes(store)[page, row], codes)
            as_bytes(store).index_put_((page, row), rows)

    def _codes(self, i: int, new: torch.Tensor, page: torch.Tensor) -> torch.Tensor:
        """Return keys (i = 0) or values as what the pages ``page`` hold."""
        if self.scales is None:
            return new
        return as_bytes(quantize(new, self.scales[page][..., i], self.k.dtype))


class LayerPages(NamedTuple):
    """The pages of one layer. Each branch has its own page size, pool and block table.

    Attributes:
        cmp: compressed tokens, of the blocks that are complete. cmp, sel and win are quantized, or
            none of them.
        sel: all tokens. Its page size is a multiple of l', and its table does not wrap around.
        win: at least the newest w tokens before each new token.
        raw: at least the newest l inputs of phi before and with each new token, not rotated unless
            ``rope_before_compress``. They are never quantized: l tokens a sequence are hardly any
            memory, and their errors would add to those of the compressed tokens.
    """

    cmp: PagedKV
    sel: PagedKV
    win: PagedKV
    raw: PagedKV

    @property
    def tables(self) -> BlockTables:
        """The block tables."""
        return BlockTables(*(pages.table for pages in self))

    @property
    def scales(self) -> PageScales | None:
        """The scales of cmp, sel and win; None if they are not quantized."""
        if self.sel.scales is None:
            return None
        return PageScales(self.cmp.scales, self.sel.scales, self.win.scales)  # type: ignore[arg-type]

    @property
    def kv_dtype(self) -> str | None:
        """The dtype of quantized pages; None if they are not quantized."""
        return None if self.sel.scales is None else dtype_name(self.sel.k.dtype)
