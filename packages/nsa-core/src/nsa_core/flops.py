"""Count the visible keys and the operations of attention, in closed form and without torch."""

from __future__ import annotations

from nsa_core.config import NSAConfig, check_config
from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_core.limits import integer_problems


def visible_pairs(geometry: BlockGeometry, length: int) -> dict[str, int]:
    """Count the visible (query, key) pairs per head of each branch and of dense causal attention.

    The count of sel is exact if the current block is always selected (local_blocks >= 1), otherwise
    it is an upper bound. Counts of packed documents are the sums over the documents.

    Args:
        geometry: Block sizes.
        length: Tokens of the sequence; the time does not depend on it.
    """
    stride, block = geometry.compress_stride, geometry.select_block_size
    # Query t sees (t + 1 - l) // d + 1 compressed tokens: each number in turn for d queries.
    rounds, rest = divmod(max(0, length + 1 - geometry.compress_block_size), stride)
    cmp = stride * _up_to(rounds) + rest * (rounds + 1)
    # In the first n * l' tokens a query sees all up to itself, later n - 1 whole blocks and its own
    # block up to itself.
    full = min(length, geometry.num_selected_blocks * block)
    blocks, rest = divmod(length - full, block)
    sel = _up_to(full) + (length - full) * (full - block) + blocks * _up_to(block) + _up_to(rest)
    filling = min(length, geometry.window_size)
    win = _up_to(filling) + (length - filling) * filling
    return {"cmp": cmp, "sel": sel, "win": win, "dense": _up_to(length)}


def _up_to(n: int) -> int:
    """Return 1 + 2 + ... + n."""
    return n * (n + 1) // 2


def attention_flops(config: NSAConfig, seq_len: int, *, dense: bool = False) -> int:
    """Count the operations of one layer's attention in a training step over one sequence.

    With P visible pairs of a query and a key per head, over the branches cmp, sel and win, the
    count is

        6 Hq (Dk + Dv) P

    A pair takes two products in the forward, q.k and p.v, and four in the backward; a
    multiplication and an addition count as two. The forward alone has a third of the operations.
    This is the convention of model FLOPs: what a kernel computes again (the scores in the backward,
    and those of the selection, which are the scores of cmp) is not counted. Operations on weights
    are not counted either: the projections, the gates and phi add 6 for each use of a weight.

    Args:
        config: The layer.
        seq_len: Tokens of the sequence. Counts of packed documents are the sums over the documents.
        dense: Count dense causal attention with the same heads instead.

    Returns:
        The operations of one layer and one sequence, forward and backward.

    Raises:
        InvalidInput: ``config`` is not an NSAConfig, or ``seq_len`` is not a positive integer.

    Example:
        >>> config = NSAConfig(dim=2048, n_heads=32, n_kv_heads=4)
        >>> attention_flops(config, 65536, dense=True) / attention_flops(config, 65536)
        9.25...
    """
    check_config(config)
    if problems := integer_problems("seq_len", seq_len):
        raise InvalidInput("; ".join(problems))
    pairs = visible_pairs(config.geometry, seq_len)
    seen = pairs["dense"] if dense else pairs["cmp"] + pairs["sel"] + pairs["win"]
    return 6 * config.n_heads * (config.qk_dim + config.v_dim) * seen
