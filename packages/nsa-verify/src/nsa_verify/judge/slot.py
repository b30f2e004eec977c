"""Judge the outputs and gradients of a slot, given bit for bit the tensors that it received."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nsa_core.dtypes import stats_dtype
from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_verify import oracle
from nsa_verify.judge.tensor import Verdict, gate_rows, heads_first, judge, judge_lse, refused
from nsa_verify.judge.truth_cache import cached
from nsa_verify.reference import attention
from nsa_verify.reference.attention import compressed_starts

_INPUTS = {
    "cmp": ("q", "k_cmp", "v_cmp"),
    "sel": ("q", "k", "v", "blocks"),
    "win": ("q", "k", "v"),
    "combine": ("gates", "o_cmp", "o_sel", "o_win"),
}
_PER_TOKEN = ("o", "dq", "dgates", "do_cmp", "do_sel", "do_win")


def path_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the lowest precision among the floating tensors that enter a computation."""
    return max(
        (t.dtype for t in tensors if t.is_floating_point()),
        key=lambda dtype: torch.finfo(dtype).eps,
    )


@cached
def judge_slot(
    slot: str,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    do: torch.Tensor | None = None,
    rows: Sequence[int] | torch.Tensor | None = None,
    first_query: int | None = None,
) -> dict[str, Verdict]:
    """Judge every tensor of ``outputs`` by the rule for its kind.

    Args:
        slot: cmp, sel, win or combine. :func:`~nsa_verify.judge.selection.judge_selection` judges
            select, which has no golden tensor.
        inputs: Inputs of the slot by their names in the contract (q, k_cmp, v_cmp, k, v, blocks,
            gates, o_cmp, ...).
        outputs: Results: o, lse, and gradients as "d" + the input's name (dq, dk_cmp, dgates,
            do_cmp, ...).
        geometry: Block sizes.
        scale: Softmax scale.
        cu_seqlens: Document bounds, int32 [documents + 1]; None if dense.
        do: Gradient of o that entered the backward, in the layout of o. Required if ``outputs`` has
            gradients.
        rows: Query rows to judge; None judges all. Every key row of dk and dv is judged, so ``do``
            must be 0 in the other rows.
        first_query: Position of row 0 of q, if q holds only some rows: see "Queries inside a
            sequence" in nsa_core.contract. None: whole sequences. combine has no positions.

    Returns:
        A verdict per output. Its ``where`` is (batch entry, head, row), or (head, row) if packed.
        A row is a token or key, also with ``rows``; in dgates it is a row of joined tokens.

    Raises:
        InvalidInput: ``do`` is not zero outside ``rows``, or S is too long to judge every row (pass
            sampled ``rows``).

    Example:
        >>> inputs = {"q": q, "k": k, "v": v}
        >>> o, lse = plan.win(q, k, v)
        >>> outputs = {"o": o, "lse": lse}
        >>> verdicts = judge_slot("win", inputs, outputs, config.geometry, config.softmax_scale)
        >>> assert all(verdicts.values()), verdicts
    """
    ordered = {name: inputs[name] for name in _INPUTS[slot]}
    sampled = None if rows is None else torch.as_tensor(rows, dtype=torch.long).unique()
    if do is not None and sampled is not None:
        _check_do_outside(do, sampled)
    options: dict[str, Any] = {"do": do}
    arguments: list[Any] = list(ordered.values())
    if slot != "combine":
        arguments += [geometry, scale]
        options |= {"cu_seqlens": cu_seqlens, "rows": sampled, "first_query": first_query}
    dtype = path_dtype([*ordered.values(), *([do] if do is not None else [])])
    golden, rounded, magnitude = _truths(slot, arguments, options, dtype)
    verdicts = {}
    for name, actual in outputs.items():
        like = (
            ordered["q" if slot != "combine" else "o_cmp"]
            if name in ("o", "lse")
            else ordered[name[1:]]
        )
        kind = stats_dtype(like.dtype) if name == "lse" else like.dtype
        if (actual.dtype, actual.device) != (kind, like.device):
            why = f"{actual.dtype} on {actual.device}, expected {kind} on {like.device}"
            verdicts[name] = refused(why)
        elif name == "lse":
            verdicts[name] = _judge_lse(actual, golden.lse, magnitude.top, dtype, sampled)
        else:
            truths = [x.o if name == "o" else x.grads[name] for x in (golden, rounded, magnitude)]
            tail = _judge_tail(name, actual, cu_seqlens, geometry)
            noise = magnitude.score_noise.get(name)
            verdicts[name] = (
                tail if tail is not None else _judge(name, [actual, *truths], noise, dtype, sampled)
            )
    return verdicts


@cached
def _truths(
    slot: str, arguments: list[Any], options: dict[str, Any], dtype: torch.dtype
) -> tuple[Any, Any, Any]:
    """Return (golden, rounded, magnitude); rounded is golden in float64."""
    golden = getattr(oracle, slot)(*arguments, **options)
    reference = getattr(attention, slot)
    rounded = (
        golden
        if dtype == torch.float64
        else reference(*arguments, **options, arithmetic="rounded", dtype=dtype)
    )
    magnitude = reference(*arguments, **options, arithmetic="magnitude", dtype=dtype)
    return golden, rounded, magnitude


def _check_do_outside(do: torch.Tensor, rows: torch.Tensor) -> None:
    """Raise InvalidInput unless ``do`` is 0 outside ``rows``."""
    outside = torch.ones(do.shape[-3], dtype=torch.bool, device=do.device)
    outside[rows.to(do.device)] = False
    if bool(do[..., outside, :, :].any()):
        raise InvalidInput(
            "do must be 0 outside the sampled rows, because every query row adds to dk and dv; set"
            " its other rows to 0"
        )


def _judge_lse(
    actual: torch.Tensor,
    golden: torch.Tensor,
    top: torch.Tensor,
    dtype: torch.dtype,
    rows: torch.Tensor | None,
) -> Verdict:
    if actual.shape != golden.shape or rows is None:
        return judge_lse(actual, golden, top, dtype)
    verdict = judge_lse(
        actual[..., rows.to(actual.device)], golden[..., rows], top[..., rows], dtype
    )
    return _with_token_index(verdict, rows, golden.dim() - 1)


def _judge_tail(
    name: str, actual: torch.Tensor, cu_seqlens: torch.Tensor | None, geometry: BlockGeometry
) -> Verdict | None:
    """Return a failed verdict if a packed compressed row without a document has a gradient."""
    if cu_seqlens is None or name not in ("dk_cmp", "dv_cmp"):
        return None
    owned = int(compressed_starts(cu_seqlens.cpu().long(), geometry)[-1])
    stray = actual[owned:].ne(0).any(-1).nonzero()
    if not len(stray):
        return None
    row, head = (int(i) for i in stray[0])
    return refused(
        "a gradient that is not exactly 0 in a row that no document owns", (head, owned + row)
    )


def _judge(
    name: str,
    tensors: list[torch.Tensor],
    score_noise: torch.Tensor | None,
    dtype: torch.dtype,
    rows: torch.Tensor | None,
) -> Verdict:
    """Judge ``tensors`` = [actual, golden, rounded, magnitude], given in the contract's layout."""
    if tensors[0].shape != tensors[1].shape:
        return refused(f"shape {tuple(tensors[0].shape)}, expected {tuple(tensors[1].shape)}")
    sampled = rows if name in _PER_TOKEN else None
    tensors = tensors if score_noise is None else [*tensors, score_noise]
    if sampled is not None:
        tensors = [x[..., sampled.to(x.device), :, :] for x in tensors]
    actual, golden, rounded, magnitude, *noise = (
        gate_rows(x) if name == "dgates" else heads_first(x) for x in tensors
    )
    verdict = judge(
        actual,
        golden,
        rounded,
        magnitude,
        dtype,
        grad=name != "o",
        score_noise=noise[0] if noise else None,
    )
    return (
        verdict
        if sampled is None or name == "dgates"
        else _with_token_index(verdict, sampled, golden.dim() - 2)
    )


def _with_token_index(verdict: Verdict, rows: torch.Tensor, axis: int) -> Verdict:
    """Replace the row index in ``where[axis]``, a position in ``rows``, by the token position."""
    if not verdict.where:
        return verdict
    where = (*verdict.where[:axis], int(rows[verdict.where[axis]]), *verdict.where[axis + 1 :])
    return dataclasses.replace(
        verdict, where=where, why=verdict.why.replace(str(verdict.where), str(where))
    )
