"""nsa_decode: one layer over pages that the caller owns."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from nsa_core.config import NSAConfig, check_config
from nsa_core.decode import op
from nsa_core.decode.checks import (
    check_metadata,
    check_plan,
    check_sequences,
    checked_host_integers,
)
from nsa_core.decode.chunks import Chunk, chunks_of
from nsa_core.decode.layer_step import Branches, Rope, per_branch
from nsa_core.decode.pages import LayerPages, PagedKV
from nsa_core.decode.run import DecodeRows, decode, default_plan
from nsa_core.errors import InvalidInput
from nsa_core.layer.phi.kinds import Phi, kind_of, make_phi
from nsa_core.layer.rope import rope_table
from nsa_core.layout import BlockGeometry
from nsa_core.limits import check_integers
from nsa_core.plan.default_plan import CACHED, backends_of, frozen_backends
from nsa_core.plan.plan import Plan

KV: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"


def rope_angles(
    config: NSAConfig,
    positions: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Rope | None:
    """Return the argument ``rope`` of :func:`nsa_decode` for the rotary embedding of a config.

    Args:
        config: the sizes of the layer.
        positions: number of positions, at least ``max_len``.
        dtype: dtype of q.
        device: device of q.

    Returns:
        cos and sin [positions, Dk / 2], float32 (float64 for float64 q), or None if
        ``config.rope`` is False.

    Raises:
        InvalidInput: an argument is invalid.

    Example:
        >>> from nsa_core import NSAConfig, rope_angles
        >>> cos, sin = rope_angles(NSAConfig(dim=64, n_heads=4, n_kv_heads=2), 128)
        >>> cos.shape
        torch.Size([128, 8])
    """
    check_config(config)
    check_integers({"positions": positions})
    if not config.rope:
        return None
    index = torch.arange(positions, device=device)
    table = rope_table(index, config.qk_dim, config.frequencies, dtype)
    return table.cos[:, 0], table.sin[:, 0]


def decode_rows(
    cu_seqlens: torch.Tensor,
    lengths: torch.Tensor,
    rows: int,
    on_host: tuple[object, object] | None = None,
) -> DecodeRows:
    """Return the rows of a step that adds any number of tokens to each of B sequences.

    It reads nothing from the device, so that a CUDA graph can replay it with new values.

    Args:
        cu_seqlens: int32 [B + 1] on the device, the first row of each sequence's new tokens, and
            the number of new tokens. Rows after the last one hold no token.
        lengths: int32 [B] on the device, number of tokens of each sequence, the new ones included.
        rows: number of rows of the step, T.
        on_host: ``cu_seqlens`` and ``lengths`` as integers on the host, lists or CPU tensors. Then
            the tokens of a sequence that gets many of them, a chunk of a prompt, attend together,
            by the prefill kernels of the backends. They must be exact for such a sequence, and the
            result serves no CUDA graph.

    Returns:
        Three int32 tensors [T] on the device of ``lengths``: the sequence's row in the block
        tables, the position of the row's token, and one past it. A row without a token has both
        positions 0. After them come the chunks.

    Raises:
        InvalidInput: an argument is invalid. Values are checked on the CPU, and on a GPU with
            NSA_CHECK=1: ``cu_seqlens`` rises from 0 to at most ``rows``, and no sequence is shorter
            than its new tokens.

    Example:
        >>> import torch
        >>> from nsa_core import decode_rows
        >>> cu_seqlens = torch.tensor([0, 1, 4], dtype=torch.int32)
        >>> lengths = torch.tensor([70, 3], dtype=torch.int32)  # one step, and one prompt
        >>> decode_rows(cu_seqlens, lengths, rows=5).starts.tolist()
        [69, 0, 1, 2, 0]
    """
    check_sequences(cu_seqlens, lengths, rows)
    chunks: tuple[Chunk, ...] = ()
    if on_host is not None:
        chunks = chunks_of(*checked_host_integers(on_host, len(lengths), rows), lengths.device)
    row = torch.arange(rows, dtype=torch.int32, device=lengths.device)
    ends = cu_seqlens[1:].contiguous()
    sequences = torch.searchsorted(ends, row, right=True).clamp_(max=len(ends) - 1)
    starts = (lengths - ends)[sequences] + row
    absent = row >= ends[-1]
    starts = starts.masked_fill(absent, 0)
    return DecodeRows(sequences.int(), starts, starts + ~absent, chunks)


def nsa_decode(
    q: torch.Tensor,  # [T, Hq, Dk]
    k: KV,  # [T, G, Dk], or the tensors of (cmp, sel, win)
    v: KV,  # [T, G, Dv], or the tensors of (cmp, sel, win)
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
        k: keys of q's dtype, one tensor [T, G, Dk] for all branches, or a list of one or of three
            (cmp, sel, win), as ``heads`` of a layer returns it; not rotated if ``rope`` is given.
        v: values [T, G, Dv], as for ``k``.
        gates: gates [T, Hq, 3] in the order cmp, sel, win, float32 (float64 for float64 q).
        pages: the pages and block tables of the layer, which the call writes. A page that it writes
            must belong to one sequence and one branch alone; only branches with the same k and v,
            rotated alike, may share theirs, such as ``win=pages.sel`` with one pair of k and v.
            Sequences may begin after pages that another one fills in the same call. Pages of cmp
            follow those of sel late: the compressed token of a block is written when its last token
            arrives, in a later page. win needs room for w + new - 1 tokens of a sequence, and raw
            for l + new - 1, where new is the number of tokens that the call adds to it. cmp, sel
            and win may be quantized, see :class:`nsa_core.PagedKV`; queries, results and all sums
            keep their dtypes.
        rows: the sequence and the position of each row, from :func:`nsa_core.decode_rows`.
        config: the sizes of the layer. Of its rotary fields, only ``rope_before_compress`` is used
            besides ``rope``.
        phi: compression of keys and of values, for example ``(attn.phi_k, attn.phi_v)`` of an
            :class:`nsa_core.NSAttention`; default: the mean over a block. Modules of other classes
            serve outside of torch.compile.
        rope: cos and sin [positions, Dk / 2] of the angles of all positions below ``max_len``,
            float32 (float64 for float64 q), from :func:`nsa_core.rope_angles` or your own. q and
            the keys of sel and win are rotated at their positions, and compressed keys at that of
            their first token. None, for a config with ``rope=False``: nothing is rotated.
        max_len: host integer, an upper bound of the lengths, which sizes the launches; default: the
            tokens that the table of ``pages.sel`` has room for.
        plan: a plan from :func:`nsa_core.resolve` with ``phase="decode"`` and the ``page_size`` of
            ``pages.sel``, and its ``kv_dtype`` if it is quantized. By default, a plan is resolved
            once per shape and cached.
        backends: the backends, without ``plan``, as for :func:`nsa_core.resolve`.

    Returns:
        The output [T, Hq, Dv] in q's dtype, 0 in rows without a token.

    Raises:
        InvalidInput: an argument is invalid, or the tensors do not fit each other or the plan.
            Values of tables and rows are checked on the CPU, and on a GPU with NSA_CHECK=1: an
            entry outside the pool, a table that is too short, a written page that is used twice,
            branches that share memory.
        Unsupported: no backend supports the call. The message lists each backend with its reasons.
        BackendUnavailable: no backend is usable on this machine.
        NSAError: the backend failed while it ran. The message names it.

    Example:
        >>> import torch
        >>> from nsa_core import LayerPages, NSAConfig, PagedKV, decode_rows, nsa_decode
        >>> config = NSAConfig(dim=64, n_heads=4, n_kv_heads=2, compress="mean", rope=False)
        >>> table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
        >>> def new_pages(rows):
        ...     return PagedKV(*torch.zeros(2, 4, rows, 2, 16), table)
        >>> pages = LayerPages(*(new_pages(rows) for rows in (4, 64, 512, 64)))
        >>> cu_seqlens = torch.tensor([0, 40, 43], dtype=torch.int32)
        >>> lengths = torch.tensor([40, 3], dtype=torch.int32)
        >>> rows = decode_rows(cu_seqlens, lengths, rows=43)
        >>> q, (k, v) = torch.randn(43, 4, 16), torch.randn(2, 43, 2, 16)
        >>> nsa_decode(q, k, v, torch.rand(43, 4, 3), pages, rows, config=config).shape
        torch.Size([43, 4, 16])
    """
    check_config(config)
    _check_structure(pages, rows, rope)
    keys, values = _per_branch("k", k), _per_branch("v", v)
    named = _named(q, keys, values, gates, pages, rows, rope)
    bound = check_metadata(named, pages, config, max_len)
    if plan is not None and backends is not None:
        raise InvalidInput("plan and backends are both passed: resolve the plan with backends=")
    if (rope is not None) != config.rope:
        raise InvalidInput(
            f"config.rope is {config.rope}, but rope is {'None' if rope is None else 'given'}: pass"
            " rope=nsa_core.rope_angles(config, max_len), which is None for a config with"
            " rope=False; then q and k are not rotated"
        )
    phis = _checked_phi(phi, config)
    if plan is not None:
        check_plan(plan, config, q, pages.sel.rows, pages.kv_dtype)
    tensors = (q, keys, values, gates, pages, rows)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if torch.compiler.is_compiling():
        chosen = op.constant_backends(backends) if plan is None else backends_of(plan)
        if plan is not None:
            deterministic = plan.requests["cmp"].deterministic
        return op.decode_op(config, chosen, deterministic, *tensors, phis, rope, bound)
    if plan is None:
        chosen = frozen_backends(backends)
        options = (pages.sel.rows, pages.kv_dtype, chosen, deterministic)
        plan = default_plan(config, q.device, q.dtype, *options)
    return decode(plan, *tensors, phis, rope, bound)


def _per_branch(name: str, x: KV) -> Branches:
    """Return the tensors of (cmp, sel, win)."""
    if isinstance(x, torch.Tensor):
        return x, x, x
    if not isinstance(x, (tuple, list)) or len(x) not in (1, 3):
        count = f" of {len(x)}" if isinstance(x, (tuple, list)) else ""
        raise InvalidInput(
            f"{name} must be one tensor or three (cmp, sel, win), got {type(x).__name__}{count}"
        )
    return per_branch(x)


def _check_structure(pages: LayerPages, rows: DecodeRows, rope: Rope | None) -> None:
    """Check the types of the arguments that hold tensors.

    Raises:
        InvalidInput: a type is wrong; the message names the argument and its type.
    """
    expected = [("pages", pages, LayerPages), ("rows", rows, DecodeRows)]
    if isinstance(pages, LayerPages):
        expected += [(f"pages.{name}", part, PagedKV) for name, part in pages._asdict().items()]
    for name, value, cls in expected:
        if not isinstance(value, cls):
            hint = ": make them with nsa_core.decode_rows" * (name == "rows")
            raise InvalidInput(
                f"{name} must be a nsa_core.{cls.__name__}, got {type(value).__name__}{hint}"
            )
    if rope is not None and not (isinstance(rope, (tuple, list)) and len(rope) == 2):
        raise InvalidInput(
            f"rope must be cos and sin, as nsa_core.rope_angles returns them, got"
            f" {type(rope).__name__}"
        )


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
    named |= {f"rows.{name}": x for name, x in zip(rows._fields, rows[:3])}
    for branch, part in pages._asdict().items():
        fields = part._asdict().items()
        named |= {f"pages.{branch}.{name}": x for name, x in fields if x is not None}
    if rope is not None:
        named |= {"rope.cos": rope[0], "rope.sin": rope[1]}
    return named


@functools.lru_cache(maxsize=CACHED)
def _means(geometry: BlockGeometry, qk_dim: int, v_dim: int) -> tuple[nn.Module, nn.Module]:
    """Return the means of keys and of values, modules without parameters."""
    return make_phi("mean", geometry, qk_dim), make_phi("mean", geometry, v_dim)


def _checked_phi(
    phi: tuple[nn.Module, nn.Module] | None, config: NSAConfig
) -> tuple[nn.Module, nn.Module]:
    """Return the phis of a call.

    Raises:
        InvalidInput: none is given, and config.compress has parameters; or they do not fit config.
    """
    if phi is None:
        if config.compress == "mean":
            # torch.compile warns of a cache that it traces through.
            means = _means.__wrapped__ if torch.compiler.is_compiling() else _means
            return means(config.geometry, config.qk_dim, config.v_dim)
        raise InvalidInput(
            f"config.compress is {config.compress!r}, whose parameters are needed: pass"
            " phi=(attn.phi_k, attn.phi_v), or use a config with compress='mean'"
        )
    is_pair = isinstance(phi, (tuple, list)) and len(phi) == 2
    if not is_pair or not all(isinstance(x, nn.Module) for x in phi):
        raise InvalidInput(
            "phi must be two modules, for keys and for values, such as (attn.phi_k, attn.phi_v),"
            f" got {type(phi).__name__}"
        )
    for i, width in enumerate((config.qk_dim, config.v_dim)):
        x = phi[i]
        if not isinstance(x, Phi):
            continue  # a module of the caller
        geometry, kind = x.geometry, kind_of(x) or config.compress  # a subclass has no kind
        actual = (kind, geometry.compress_block_size, geometry.compress_stride, x.width)
        needed = (config.compress, config.compress_block_size, config.compress_stride, width)
        if actual != needed:
            kinds = ["{!r} with l={}, d={}, D={}".format(*sizes) for sizes in (actual, needed)]
            raise InvalidInput(
                f"phi[{i}] is {kinds[0]}, but config needs {kinds[1]}: pass the phi of a layer of"
                " this config"
            )
    return phi[0], phi[1]
