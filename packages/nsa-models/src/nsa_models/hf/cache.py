"""The cache of an NSA model for `generate`: one NSACache per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from nsa_core.cache.cache import NSACache, resized
from nsa_core.errors import InvalidInput
from nsa_core.layer.module import NSAttention
from nsa_core.limits import check_integers
from nsa_core.torch_ops.torch_state import dtype_of_products
from nsa_models.hf.rows import TokenRows

GROWTH = 2**16  # tokens; a full cache doubles, but grows by at most this number
NEW_TOKENS = 4096  # for which `generate` allocates at once; many texts end long before their limit


class NSACacheLayer(CacheLayerMixin):
    """The cache of one layer, allocated by the first call and enlarged on demand.

    Columns are the rows of the batch that the layer has seen, padding included. They differ from
    the lengths of the NSACache, which holds tokens only.

    Args:
        attn: The layer.
        max_len: Number of columns for which the first call allocates memory.
        max_rollback: Maximum number of columns that :meth:`crop` can remove.

    Attributes:
        state: The tokens; None before the first call.
        columns: Number of columns.
        limit: Number of columns at which `generate` ends; 0 if another caller made the cache.
        padded: (first column, bool [B, columns] that is True for tokens) of each call with padding.
    """

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, attn: NSAttention, max_len: int, max_rollback: int) -> None:
        super().__init__()
        self.attn, self.max_len, self.max_rollback = attn, max_len, max_rollback
        self.state: NSACache | None = None
        self.columns = self.limit = 0
        self.padded: list[tuple[int, torch.Tensor]] = []

    def attend(
        self,
        forward: Callable[..., torch.Tensor],
        x: torch.Tensor,
        rows: TokenRows | None,
    ) -> torch.Tensor:
        """Append the tokens of x [B, S, dim] and return the layer's output for them.

        Args:
            forward: The forward of the layer, as NSAttention.forward.
            x: The input; under torch.no_grad() if it requires grad.
            rows: The rows of x that are tokens; None if all are.
        """
        state = self._state_for(x)
        tokens = x if rows is None else rows.to_front(x)
        if rows is None:
            y = forward(tokens, cache=state)
        else:
            counts = rows.is_token.sum(1).tolist() if rows.counts is None else rows.counts
            y = forward(tokens, cache=state, new=counts)
        if rows is not None:
            y = rows.restore(y)
            self.padded.append((self.columns, rows.is_token))
        self.columns += x.shape[1]
        return y

    def _state_for(self, x: torch.Tensor) -> NSACache:
        """Return the NSACache with room for the rows of x."""
        needed = self.columns + x.shape[1]
        if self.state is None:
            spare = NEW_TOKENS if self.limit else 0
            self.state = self.attn.new_cache(
                x.shape[0],
                self._room(needed, max(self.max_len, needed + spare)),
                max_rollback=self.max_rollback,
                dtype=dtype_of_products(x),
                device=x.device,
            )
            self.is_initialized = True
        elif needed > self.state.max_len:
            more = min(self.state.max_len, GROWTH)
            self.state = resized(self.state, self._room(needed, self.state.max_len + more))
        return self.state

    def _room(self, needed: int, wanted: int) -> int:
        """Return the columns to allocate: ``wanted``, but none beyond a limit that still holds."""
        return max(needed, min(wanted, self.limit) if needed <= self.limit else wanted)

    @property
    def batch_size(self) -> int:
        """Number of sequences; -1 before the first call."""
        return -1 if self.state is None else self.state.batch

    def lazy_initialization(self, key_states: Any, value_states: Any) -> NoReturn:
        """Refuse: :meth:`attend` allocates the cache."""
        raise InvalidInput("an NSACacheLayer is initialised by the first call of its layer")

    def update(self, key_states: Any, value_states: Any, *args: Any, **options: Any) -> NoReturn:
        """Refuse: NSAttention writes its own cache."""
        raise InvalidInput(
            "an NSACacheLayer holds the keys of an NSA layer, but a dense layer called update():"
            " pass the cache to the model that created it"
        )

    def get_seq_length(self) -> int:
        """Return the number of columns."""
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns after a call of ``query_length`` rows, and the first one."""
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the cache grows."""
        return -1

    def reset(self) -> None:
        """Remove all tokens."""
        if self.state is not None:
            self.state.reset()
        self.columns, self.padded = 0, []

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns.

        Args:
            tokens_to_remove: 0, or a negative integer: minus the number of columns.

        Raises:
            InvalidInput: The number is out of range, or a sequence has more than ``max_rollback``
                tokens in these columns.
        """
        if self.state is None or tokens_to_remove == 0:
            return
        if not -self.columns <= tokens_to_remove < 0:
            raise InvalidInput(
                f"crop: tokens_to_remove must be from {-self.columns} to 0, got {tokens_to_remove}"
            )
        columns = self.columns + tokens_to_remove
        lengths = [length + tokens_to_remove for length in self.state.host_lengths()]
        for first, is_token in self.padded:
            if first + is_token.shape[1] > columns:  # padding is not in the state
                padding = (~is_token[:, max(columns - first, 0) :]).sum(1).tolist()
                lengths = [length + n for length, n in zip(lengths, padding)]
        self.state.crop(lengths)
        self.columns = columns
        self.padded = [(i, mask[:, : columns - i]) for i, mask in self.padded if i < columns]

    def reorder_cache(self, beam_idx: Sequence[int] | torch.Tensor) -> None:
        """Replace each sequence b by the former sequence ``beam_idx[b]``."""
        if self.state is not None:
            self.state.reorder(beam_idx)
            self.padded = [(first, is_token[beam_idx]) for first, is_token in self.padded]

    def batch_select_indices(self, indices: Sequence[int] | torch.Tensor) -> None:
        """Keep only the sequences ``indices``, integers or a bool mask [B]."""
        if self.state is None:
            return
        rows = _row_list(indices)
        self.state = resized(self.state, self.state.max_len, rows)
        self.padded = [(first, is_token[rows]) for first, is_token in self.padded]

    def __deepcopy__(self, memo: dict[int, Any]) -> NSACacheLayer:
        copied = NSACacheLayer(self.attn, self.max_len, self.max_rollback)
        copied.limit = self.limit
        if self.state is not None:
            copied.state = resized(self.state, self.state.max_len)
            copied.is_initialized = True
        copied.columns, copied.padded = self.columns, list(self.padded)
        return copied


def _row_list(indices: Sequence[int] | torch.Tensor) -> list[int]:
    """Return indices of sequences, integers or a bool mask [B], as a list."""
    if isinstance(indices, torch.Tensor):
        indices = (indices.nonzero() if indices.dtype == torch.bool else indices).flatten()
        indices = indices.tolist()
    return list(indices)


class NSAModelCache(Cache):
    """The cache of an NSA model, created by ``model.new_cache()`` and by ``generate``.

    Args:
        layers: The attention layers of the model, in order; None for a dense layer.
        max_len: Number of tokens per sequence for which memory is allocated; the cache grows.
        max_rollback: Maximum number of tokens that ``crop`` can remove.

    Raises:
        InvalidInput: A number is out of range.
    """

    layers: list[NSACacheLayer | DynamicLayer]

    def __init__(
        self, layers: Sequence[NSAttention | None], max_len: int = 0, max_rollback: int = 0
    ):
        check_integers({}, {"max_len": max_len, "max_rollback": max_rollback})
        caches: list[NSACacheLayer | DynamicLayer] = [
            DynamicLayer() if attn is None else NSACacheLayer(attn, max_len, max_rollback)
            for attn in layers
        ]
        super().__init__(layers=caches)

    @property
    def _first(self) -> NSACacheLayer:
        return next(layer for layer in self.layers if isinstance(layer, NSACacheLayer))

    @property
    def _strict_first(self) -> list[NSACacheLayer | DynamicLayer]:
        """The layers with NSA first: they refuse a wrong argument before a dense layer changes."""
        return sorted(self.layers, key=lambda layer: isinstance(layer, DynamicLayer))

    @property
    def is_croppable(self) -> bool:
        """Whether :meth:`crop` can remove tokens; `generate` reads it."""
        return self._first.max_rollback > 0

    @property
    def has_padding(self) -> bool:
        """Whether a column of a sequence is padding."""
        return bool(self._first.padded)

    def tokens(self, batch: int, device: torch.device) -> torch.Tensor:
        """Return the columns that are tokens and no padding, bool [batch, columns]."""
        is_token = torch.ones(batch, self._first.columns, dtype=torch.bool, device=device)
        for first, part in self._first.padded:
            is_token[:, first : first + part.shape[1]] = part
        return is_token

    def host_lengths(self, batch: int) -> list[int]:
        """Return the number of tokens of each of ``batch`` sequences."""
        state = self._first.state
        return [0] * batch if state is None else state.host_lengths()

    def check_complete(self, batch: int) -> None:
        """Check that the cache has ``batch`` sequences, and all layers the same columns.

        Raises:
            InvalidInput: The number of sequences differs; or the columns differ, because a call
                raised an error in one of the layers.
        """
        if self._first.batch_size not in (-1, batch):
            raise InvalidInput(
                f"the input has {batch} sequences, but past_key_values has"
                f" {self._first.batch_size}: use batch_select_indices, or create a new cache"
            )
        columns = [layer.get_seq_length() for layer in self.layers]
        if min(columns) != max(columns):
            raise InvalidInput(
                f"past_key_values has layers with {min(columns)} and with {max(columns)} tokens,"
                " because a call with it ended with an error: call its reset(), or create a new"
                " cache"
            )

    def check_mask(self, is_token: torch.Tensor) -> None:
        """Check that a mask, bool [B, at least columns], has the tokens of the cache.

        Raises:
            InvalidInput: The mask differs; the message names the first entry that does.
        """
        held = self.tokens(len(is_token), is_token.device)
        if differs := (is_token[:, : held.shape[1]] != held).nonzero().tolist():
            row, column = differs[0]
            now, before = int(is_token[row, column]), int(held[row, column])
            raise InvalidInput(
                f"attention_mask[{row}, {column}] is {now}, but was {before} in the call that"
                " filled past_key_values: pass the masks of all calls, side by side"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns; see :meth:`NSACacheLayer.crop`."""
        for layer in self._strict_first:
            layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the sequences for beam search. Synchronises once."""
        order = beam_idx.tolist()
        for layer in self._strict_first:
            layer.reorder_cache(beam_idx if isinstance(layer, DynamicLayer) else order)

    def batch_select_indices(self, indices: Sequence[int] | torch.Tensor) -> None:
        """Keep only the sequences ``indices``, integers or a bool mask [B]."""
        for layer in self._strict_first:
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
        batch = max(self._first.batch_size, 0)
        self.batch_select_indices([b for b in range(batch) for _ in range(repeats)])
