"""Faults in decode forms, which the decode checks must find."""

from __future__ import annotations

from harness import Mutant

_DECODE = "nsa_backend_sdpa.decode"


def _mutant(name: str, old: str, new: str) -> Mutant:
    return Mutant(f"decode: {name}", _DECODE, old, new, "decode")


DECODE_MUTANTS = (
    # addresses
    _mutant(
        "page number without the block table",
        "page = table.long().gather(1, column.flatten(1)).view(column.shape)",
        "page = column",
    ),
    _mutant(
        "the last row of a page is not used",
        "store.shape[0] - 1), tokens % size",
        "store.shape[0] - 1), tokens % max(1, size - 1)",
    ),
    _mutant(
        "a table that does not wrap around",
        'column = tokens.div(size, rounding_mode="floor") % columns',
        'column = tokens.div(size, rounding_mode="floor").clamp(0, columns - 1)',
    ),
    _mutant(
        "window of the next token",
        "torch.arange(1 - window, rows, device=q.device)",
        "torch.arange(2 - window, rows, device=q.device)",
    ),
    _mutant(
        "every group reads the keys of the first group",
        "* groups + group)",
        "* groups + group * 0)",
    ),
    # visibility
    _mutant("window one token long", "(token <= last - window", "(token < last - window"),
    _mutant(
        "window one token short",
        "(token <= last - window",
        "(token <= last + 1 - window",
    ),
    _mutant(
        "window sees later tokens of the step",
        "(token > last) | (token <=",
        "(token >= call.lengths[:, None, None, None, None]) | (token <=",
    ),
    _mutant("cmp sees a block one token early", "ends > last + 1", "ends > last + 2"),
    _mutant("cmp sees a block one token late", "ends > last + 1", "ends > last"),
    _mutant(
        "cmp multiplies a value not yet written",
        "present = ends <= call.lengths[:, None]",
        "present = ends - call.geometry.compress_stride <= call.lengths[:, None]",
    ),
    _mutant(
        "select scores an invisible token",
        "(ends > last[..., None])",
        "(ends > last[..., None] + 4)",
    ),
    _mutant(
        "sel drops the last block",
        'token.div(size, rounding_mode="floor")',
        'token.div(size, rounding_mode="floor") - 1',
    ),
    _mutant(
        "sel sees the token after the query",
        "(token - first_key).clamp_",
        "(token - first_key + 1).clamp_",
    ),
    # rows of the step
    _mutant(
        "padding rows treated as tokens",
        "position >= call.lengths[:, None]",
        "position >= call.max_len",
    ),
    _mutant(
        "every row treated as a new token",
        "position = call.starts.long()[:, None]",
        "position = call.lengths.long()[:, None] - q.shape[1]",
    ),
    _mutant(
        "lengths cached from the first call",
        "    return position.masked_fill(position >= call.lengths[:, None], -1)",
        "    fresh = position.masked_fill(position >= call.lengths[:, None], -1)\n"
        "    return call.__dict__.setdefault('kept', fresh)",
    ),
    _mutant(
        "equal scores select the higher block",
        "blocks = choose(scores, last",
        "blocks = choose(scores * (1 + 2**-20 * torch.arange(scores.shape[-1])), last",
    ),
)
