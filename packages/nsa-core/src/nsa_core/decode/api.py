"""nsa_decode: one layer over pages that the caller owns."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from nsa_core.config import NSAConfig
from nsa_core.decode import op
from nsa_core.decode.checks import check_metadata, check_plan
from nsa_core.decode.layer_step import Branches
from nsa_core.decode.pages import LayerPages
from nsa_core.decode.run import DecodeRows, Rope, decode, default_plan
from nsa_core.errors import InvalidInput
from nsa_core.layer.phi.kinds import make_phi
from nsa_core.plan.default_plan import frozen_backends

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from nsa_core.plan.plan import Plan

KV: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]"


def decode_rows(cu_seqlens: torch.Tensor, lengths: torch.Tensor, rows: int) -> DecodeRows:
    """Return the rows of a step that adds any number of tokens to each of B sequences.

    It reads nothing on the host, so that a CUDA graph can replay it with new values.

    Args:
        cu_seqlens: int32 [B + 1] on the device, the first row of each sequence's new tokens, and
            the number of new tokens. Rows after the last one hold no token.
        lengths: int32 [B] on the device, number of tokens of each sequence, the new ones included.
        rows: number of rows of the step, T.

    Example:
        >>> import torch
        >>> from nsa_core import decode_rows
        >>> cu_seqlens = torch.tensor([0, 1, 4], dtype=torch.int32)
        >>> lengths = torch.tensor([70, 3], dtype=torch.int32)  # one step, and one prompt
        >>> decode_rows(cu_seqlens, lengths, rows=5).starts.tolist()
        [69, 0, 1, 2, 0]
    """
    row = torch.arange(rows, dtype=torch.int32, device=lengths.device)
    ends = cu_seqlens[1:].contiguous()
    sequences = torch.searchsorted(ends, row, right=True).clamp_(max=len(ends) - 1)
    starts = (lengths - ends)[sequences] + row
    absent = row >= ends[-1]
    starts = starts.masked_fill(absent, 0)
    return DecodeRows(sequences.int(), starts, starts + ~absent)


def nsa_decode(
    q: torch.Tensor,  # [T, Hq, Dk]
    k: KV,  # [T, G, Dk], or three tensors (cmp, sel, win)
    v: KV,  # [T, G, Dv], or three tensors (cmp, sel, win)
    gates: torch.Tensor,  # [T, Hq, 3], fp32 (fp64 for fp64 q), in the order cmp, sel, win
    pages: LayerPages,
    rows: DecodeRows,
    *,
    config: NSAConfig,
    phi: tuple[nn.Module, nn.Module] | None = None,
    rope: Rope | None = None,  # cos and sin, fp32 [positions, Dk / 2]
    max_len: int | None = None,
    plan: Plan | None = None,
    backends: str | Mapping[str, str] | None = None,
) -> torch.Tensor:
    """Append new tokens to the pages of one layer, and attend from them to their sequences.

    The mathematics are those of a layer with a cache (docs/explanation/decode.md); the caller owns
    the memory, the block tables and the lengths. All rows are appended first; then phi compresses
    the blocks that are now complete; then each row attends to the tokens up to its own. A step of
    one token, a step of several tokens and a chunk of a prompt may be in one call. The call has no
    gradient and reads nothing from the device, so that a CUDA graph can replay it with new values
    in the same tensors. Under torch.compile it is one operator.

    Sizes: T rows, Hq query heads, G kv heads, head widths Dk and Dv.

    Args:
        q: queries [T, Hq, Dk], bfloat16, float16, float32 or float64; not rotated if ``rope`` is
            given.
        k: keys of q's dtype, one tensor [T, G, Dk] for all branches, or three (cmp, sel, win); not
            rotated if ``rope`` is given.
        v: values [T, G, Dv], as for ``k``.
        gates: gates [T, Hq, 3] in the order cmp, sel, win, float32 (float64 for float64 q).
        pages: the pages and block tables of the layer, which the call writes. A page that it writes
            must belong to one sequence alone. Pages of cmp follow those of sel late: the compressed
            token of a block is written when its last token arrives, in a later page of sel.
            win needs room for w + new - 1 tokens of a sequence, and raw for l + new - 1, where new
            is the number of tokens that the call adds to it.
        rows: the sequence and the position of each row, from :func:`nsa_core.decode_rows`.
        config: the sizes of the layer; ``rope`` replaces its rotary fields, except
            ``rope_before_compress``.
        phi: compression of keys and of values, for example ``(attn.phi_k, attn.phi_v)`` of an
            :class:`nsa_core.NSAttention`; default: the mean over a block.
        rope: cos and sin [positions, Dk / 2] of the angles of all positions below ``max_len``,
            float32 (float64 for float64 q). q and the keys of sel and win are then rotated at their
            positions, and compressed keys at that of their first token. By default nothing is
            rotated.
        max_len: host integer, an upper bound of the lengths, which sizes the launches; default: the
            tokens that the table of ``pages.sel`` has room for.
        plan: a plan from :func:`nsa_core.resolve` with ``phase="decode"`` and the ``page_size`` of
            ``pages.sel``. By default, a plan is resolved once per shape and cached.
        backends: the backends, without ``plan``, as for :func:`nsa_core.resolve`.

    Returns:
        The output [T, Hq, Dv] in q's dtype, 0 in rows without a token.

    Raises:
        InvalidInput: an argument is invalid, or the tensors do not fit each other or the plan.
            Values of tables and rows are checked on the CPU, and on a GPU with NSA_CHECK=1: an
            entry outside the pool, a table that is too short, a written page that is used twice.
        Unsupported: no backend supports the call. The message lists each backend with its reasons.
        BackendUnavailable: no backend is usable on this machine.
        NSAError: the backend failed while it ran. The message names it.

    Example:
        >>> import torch
        >>> from nsa_core import LayerPages, NSAConfig, PagedKV, decode_rows, nsa_decode
        >>> config = NSAConfig(dim=64, n_heads=4, n_kv_heads=2, compress="mean", window_size=64)
        >>> table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
        >>> def new_pages(rows):
        ...     return PagedKV(*torch.zeros(2, 4, rows, 2, 16), table)
        >>> pages = LayerPages(new_pages(4), new_pages(64), new_pages(64), new_pages(64))
        >>> cu_seqlens = torch.tensor([0, 40, 43], dtype=torch.int32)
        >>> lengths = torch.tensor([40, 3], dtype=torch.int32)
        >>> rows = decode_rows(cu_seqlens, lengths, rows=43)
        >>> q, (k, v) = torch.randn(43, 4, 16), torch.randn(2, 43, 2, 16)
        >>> nsa_decode(q, k, v, torch.rand(43, 4, 3), pages, rows, config=config).shape
        torch.Size([43, 4, 16])
    """
    room = pages.sel.capacity
    bound = room if max_len is None else max_len
    keys, values = _per_branch("k", k), _per_branch("v", v)
    check_metadata(_named(q, keys, values, gates, pages, rows, rope), pages, config, bound)
    if plan is not None and backends is not None:
        raise InvalidInput("plan and backends are both passed: resolve the plan with backends=")
    phis = _checked_phi(phi, config)
    if plan is not None:
        check_plan(plan, config, q, pages.sel.rows)
    tensors = (q, keys, values, gates, pages, rows)
    if torch.compiler.is_compiling():
        chosen = op.constant_backends(backends) if plan is None else op.backends_of(plan)
        return op.decode_op(config, chosen, *tensors, phis, rope, bound)
    if plan is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
        chosen = frozen_backends(backends)
        page_size = pages.sel.rows
        plan = default_plan(config, q.device, q.dtype, page_size, chosen, deterministic)
    return decode(plan, *tensors, phis, rope, bound)


def _per_branch(name: str, x: KV) -> Branches:
    """Return the tensors of (cmp, sel, win)."""
    if isinstance(x, torch.Tensor):
        return x, x, x
    if not isinstance(x, (tuple, list)) or len(x) != 3:
        raise InvalidInput(
            f"{name} must be one tensor or three (cmp, sel, win), got {type(x).__name__}"
        )
    return x[0], x[1], x[2]


def _named(
    q: torch.Tensor,
    keys: Branches,
    values: Branches,
    gates: torch.Tensor,
    pages: LayerPages,
    rows: DecodeRows,
    rope: Rope | None,
) -> dict[str, torch.Tensor]:
    """Return all tensors of a call by the names that errors give them."""
    named = {"q": q}
    for name, parts in (("k", keys), ("v", values)):
        named |= {f"{name}[{branch}]": x for branch, x in zip(("cmp", "sel", "win"), parts)}
    named["gates"] = gates
    named |= {f"rows.{name}": x for name, x in rows._asdict().items()}
    for branch, part in pages._asdict().items():
        named |= {f"pages.{branch}.{name}": x for name, x in part._asdict().items()}
    if rope is not None:
        named |= {"rope.cos": rope[0], "rope.sin": rope[1]}
    return named


def _checked_phi(
    phi: tuple[nn.Module, nn.Module] | None, config: NSAConfig
) -> tuple[nn.Module, nn.Module]:
    """Return the phis of a call.

    Raises:
        InvalidInput: none is given, and config.compress has parameters.
    """
    if phi is not None:
        return phi
    if config.compress != "mean":
        raise InvalidInput(
            f"config.compress is {config.compress!r}, whose parameters are needed: pass"
            " phi=(attn.phi_k, attn.phi_v), or use a config with compress='mean'"
        )
    width = config.qk_dim
    return make_phi("mean", config.geometry, width), make_phi("mean", config.geometry, width)
