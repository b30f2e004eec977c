"""Faults planted in decode forms, to be found by the decode checks alone."""

from __future__ import annotations

from harness import Mutant

_DECODE = "nsa_backend_sdpa.decode"


def _mutant(name: str, old: str, new: str) -> Mutant:
    return Mutant(f"decode: {name}", _DECODE, old, new, "decode")


DECODE_MUTANTS = (
    # where things lie
    _mutant(
        "pages taken in order",
        "page = call.block_table.long().gather(1, logical_page.flatten(1))"
        ".view(logical_page.shape)",
        "page = logical_page",
    ),
    _mutant(
        "row of a selection block for the row of a page",
        "store.shape[0] - 1), tokens % size",
        "store.shape[0] - 1), tokens % call.geometry.select_block_size",
    ),
    _mutant(
        "ring modulo the window",
        "torch.arange(ring, device=q.device)) % ring",
        "torch.arange(ring, device=q.device)) % call.geometry.window_size",
    ),
    _mutant(
        "newest token one too far",
        "newest = call.lengths.long()[:, None] - 1",
        "newest = call.lengths[:, None]",
    ),
    _mutant(
        "every group reads the first",
        "* groups + group)",
        "* groups + group * 0)",
    ),
    # what is seen
    _mutant(
        "window one token long", "(token <= last - call.geometry", "(token < last - call.geometry"
    ),
    _mutant(
        "window one token short",
        "(token <= last - call.geometry",
        "(token <= last + 1 - call.geometry",
    ),
    _mutant(
        "window sees the step's later tokens",
        "(token > last) | (token <=",
        "(token >= call.lengths[:, None, None, None, None]) | (token <=",
    ),
    _mutant("cmp sees a block one token early", "ends > last + 1", "ends > last + 2"),
    _mutant("cmp sees a block one token late", "ends > last + 1", "ends > last"),
    _mutant(
        "cmp multiplies a value that is not there yet",
        "present = ends <= call.lengths[:, None]",
        "present = ends - call.geometry.compress_stride <= call.lengths[:, None]",
    ),
    _mutant(
        "select scores a block that is not visible",
        "(ends > last[..., None])",
        "(ends > last[..., None] + 4)",
    ),
    _mutant(
        "sel forgets the last block",
        'token.div(size, rounding_mode="floor")',
        'token.div(size, rounding_mode="floor") - 1',
    ),
    _mutant(
        "sel not cut at its token",
        "(token - block * size).clamp_",
        "(token - block * size + 1).clamp_",
    ),
    # the step
    _mutant("padding is a token", "position >= call.lengths[:, None]", "position >= call.max_len"),
    _mutant(
        "every row of the step is new",
        "position = call.starts.long()[:, None] + torch.arange",
        "position = call.lengths.long()[:, None] - q.shape[1] + torch.arange",
    ),
    _mutant(
        "lengths of the first step that used these tensors",
        "    return position.masked_fill(position >= call.lengths[:, None], -1)",
        "    fresh = position.masked_fill(position >= call.lengths[:, None], -1)\n"
        "    return call.__dict__.setdefault('kept', fresh)",
    ),
    _mutant(
        "equal scores to the higher block",
        "blocks = choose(scores, last",
        "blocks = choose(scores * (1 + 2**-20 * torch.arange(scores.shape[-1])), last",
    ),
)
