"""History: a layer, a cache or a pool of pages, and the operations on it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, TypeVar

from nsa_core.config import COMPRESS_KINDS, GATE_KINDS, NSAConfig
from nsa_core.errors import InvalidInput
from nsa_verify.drawn.line import (
    LARGEST,
    Drawn,
    below,
    integer,
    one_of,
    read_integer,
    read_integers,
    switch,
)

if TYPE_CHECKING:
    import torch

ROPE = ("after", "before", "none")
NEWEST = ("ring", "freed")
LAYOUTS = ("nhd", "hnd")
KV = ("plain", "fp8", "int8", "fp8-pages", "int8-pages")
AnyHistory = TypeVar("AnyHistory", bound="LayerHistory")
# Each operation, and its number of integers: per sequence (0) or fixed.
OPERATIONS: Mapping[str, int] = {
    "step": 0,
    "crop": 0,
    "reorder": 0,
    "reserve": 0,
    "reset": 1,
    "save": 1,
    "release": 1,
    "load": 2,
}
POOL_OPERATIONS: Mapping[str, int] = {"step": 0, "crop": 0, "reset": 1, "fork": 2, "move": 1}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One call on a cache, or one action of the owner of a pool.

    Attributes:
        kind: A key of :data:`OPERATIONS` or :data:`POOL_OPERATIONS`.
        values: The integers of the call. step: new tokens of each sequence. crop, reserve: a length
            per sequence. reorder: a former sequence per sequence. reset, save, move: a sequence.
            load: a snapshot, by its number, and a sequence. release: a snapshot. fork: a sequence,
            and the one that becomes a copy of it.
        padding: Rows of a step after the longest sequence.
    """

    kind: str
    values: tuple[int, ...]
    padding: int = 0

    def __str__(self) -> str:
        padding = f"+{self.padding}" if self.padding else ""
        return f"{self.kind}={','.join(map(str, self.values))}{padding}"

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return max(self.values) + self.padding

    def simpler(self) -> Iterator[Operation]:
        """Yield simpler forms: less padding, smaller numbers."""
        if self.padding and max(self.values):
            yield dataclasses.replace(self, padding=0)
        if self.kind in ("step", "crop", "reserve"):
            for i, value in enumerate(self.values):
                for less in below(value, 0):
                    values = (*self.values[:i], less, *self.values[i + 1 :])
                    yield dataclasses.replace(self, values=values)


def read_operation(kind: str, text: str) -> Operation:
    """Return the operation that a line writes as ``kind=text``.

    Raises:
        InvalidInput: ``text`` is no list of integers, or no step has padding.
    """
    numbers, plus, padding = text.partition("+")
    try:
        return Operation(kind, read_integers(numbers), read_integer(padding) if plus else 0)
    except ValueError:
        raise InvalidInput(
            f"case: {kind} must be integers of 0 to {LARGEST} joined by commas, and in a step"
            f" +PADDING, such as step=5,0+2, got {text!r:.80}"
        ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerHistory(Drawn):
    """A layer, sequences, and operations on them.

    Attributes:
        compress: The phi of the layer.
        gate: Its gate.
        rope: "after" rotates compressed keys after phi, "before" before it.
        qk_norm: The argument of NSAConfig.
        shared_kv: The argument of NSAConfig.
        batch: Number of sequences.
        max_len: Maximum tokens per sequence.
        page_size: Tokens per page of sel; 0 for a cache without pages.
        max_rollback: Tokens that a crop may remove.
        operations: The operations, in their order.
    """

    FIXED: ClassVar[tuple[str, ...]] = ("batch", "max_len")
    SMALLER: ClassVar[tuple[str, ...]] = ("groups", "h")

    d: int = integer(2)
    n: int = integer(3)
    init: int = integer(1, 0)
    local: int = integer(2, 0)
    w: int = integer(5)
    h: int = integer(2)
    dk: int = integer(8)
    dv: int = integer(8)
    compress: str = one_of("mean", COMPRESS_KINDS)
    gate: str = one_of("linear", GATE_KINDS)
    rope: str = one_of("after", ROPE)
    qk_norm: bool = switch()
    shared_kv: bool = switch()
    batch: int = integer(1)
    max_len: int = integer(40)
    page_size: int = integer(0, 0)
    max_rollback: int = integer(0, 0)
    operations: tuple[Operation, ...] = ()

    def __str__(self) -> str:
        """Return the line."""
        return " ".join([super().__str__(), *map(str, self.operations)])

    @functools.cached_property
    def config(self) -> NSAConfig:
        """The layer configuration.

        Raises:
            InvalidInput: The sizes are invalid; the message names every invalid field.
        """
        return self._config(
            dim=12,
            compress=self.compress,
            gate=self.gate,
            rope=self.rope != "none",
            rope_before_compress=self.rope == "before",
            qk_norm=self.qk_norm,
            shared_kv=self.shared_kv,
        )

    @property
    def lengths_of_case(self) -> tuple[tuple[int, ...], int, bool]:
        """Lengths, batch and ``packed`` of its Case."""
        return (self.max_len,), self.batch, False

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each operation that does not fit the batch."""
        yield from super().problems()
        for operation in self.operations:
            count = self.OPERATIONS[operation.kind]
            if len(operation.values) != (count or self.batch):
                each = " (one per sequence of the batch)" * (not count)
                yield f"{operation} must have {count or self.batch} integers{each}"
            if operation.padding and operation.kind != "step":
                yield f"{operation}: only a step has rows of padding"

    def shorter(self: AnyHistory) -> Iterator[AnyHistory]:
        """Yield neighbours with fewer operations and sequences, or less to do."""
        operations = self.operations
        for count in below(len(operations), 1):
            yield self.replace(operations=operations[:count])
        for b in range(self.batch if self.batch > 1 else 0):
            yield self._without_sequence(b)
        for i in range(len(operations)):
            if not self._renumbers(i):
                yield self.replace(operations=operations[:i] + operations[i + 1 :])
        for i, operation in enumerate(operations):
            for simpler in operation.simpler():
                yield self.replace(operations=(*operations[:i], simpler, *operations[i + 1 :]))

    def _renumbers(self, i: int) -> bool:
        """Return whether later operations name snapshots by numbers that a removal would change."""
        later = self.operations[i + 1 :]
        return self.operations[i].kind == "save" and any(
            operation.kind in ("load", "release") for operation in later
        )

    def _without_sequence(self: AnyHistory, b: int) -> AnyHistory:
        """Remove sequence ``b`` and the operations on it alone."""
        operations = []
        for operation in self.operations:
            values, kind = operation.values, operation.kind
            if not self.OPERATIONS[kind]:
                values = values[:b] + values[b + 1 :]
            if kind in ("reorder", "fork"):
                values = tuple(max(i - (i >= b), 0) for i in values)
            elif kind in ("reset", "save", "load", "move"):
                values = (*values[:-1], max(values[-1] - (values[-1] >= b), 0))
            operations.append(dataclasses.replace(operation, values=values))
        return self.replace(batch=self.batch - 1, operations=tuple(operations))


@dataclasses.dataclass(frozen=True, kw_only=True)
class History(LayerHistory):
    """A layer, the arguments of ``new_cache``, the limit of a chunk, and operations.

    Attributes:
        num_pages: Number of pages; 0 for enough.
        max_step: Rows of a captured step; a longer step is a chunk.
        chunk_rows: A chunk of more rows is cut.
    """

    OPERATIONS: ClassVar[Mapping[str, int]] = OPERATIONS

    kind: str = dataclasses.field(default="cache", kw_only=False)
    num_pages: int = integer(0, 0)
    max_step: int = integer(64)
    chunk_rows: int = integer(8192)

    @property
    def check_name(self) -> str:
        """Name of the check that runs the history."""
        return "cache histories"

    def shorter(self) -> Iterator[History]:
        """Yield neighbours with fewer operations and sequences, without pages, or less to do."""
        if self.page_size:
            yield self.replace(page_size=0, num_pages=0)
        yield from super().shorter()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolHistory(LayerHistory):
    """Calls of nsa_decode, and what the owner of the pages does between them.

    reset frees the pages of a sequence. fork lets a sequence share the full pages of another one.
    move copies the pages of a sequence to free pages. A step first copies the shared pages that it
    writes. Every row that no sequence owns is NaN, and table entries without a page are far outside
    the pool.

    Attributes:
        cmp_page: Compressed tokens per page.
        newest: Pages of win and raw: "ring", in which a table of a few columns wraps around, or
            "freed", in which pages behind the window are freed.
        newest_page: Tokens per page of win and raw.
        layout: Layout of the pools, "nhd" [P, page, G, D] or "hnd" [P, G, page, D].
        kv: "plain" pages, or quantized pages with a scale a head, or (-pages) a page and head.
        chunks: Whether a sequence that gets several tokens runs the prefill kernels.
    """

    OPERATIONS: ClassVar[Mapping[str, int]] = POOL_OPERATIONS

    kind: str = dataclasses.field(default="nsa_decode", kw_only=False)
    page_size: int = integer(4)
    cmp_page: int = integer(1)
    newest: str = one_of("ring", NEWEST)
    newest_page: int = integer(4)
    layout: str = one_of("nhd", LAYOUTS)
    kv: str = one_of("plain", KV)
    chunks: bool = switch()

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """Dtype of quantized pages."""
        import torch

        dtypes = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
        return dtypes.get(self.kv.partition("-")[0])

    @property
    def check_name(self) -> str:
        """Name of the check that runs the history."""
        return "page histories"

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each value that does not fit the others."""
        yield from super().problems()
        if self.page_size % self.block:
            yield f"page_size must be a multiple of block={self.block}, got {self.page_size}"
