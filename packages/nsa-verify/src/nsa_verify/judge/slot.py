"""A slot's outputs and gradients against the truth for bit for bit the tensors that slot
received.
"""

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
from nsa_verify.judge.truth_cache import recall
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
    """The lowest precision among the floating tensors that entered a computation."""
    return max(
        (t.dtype for t in tensors if t.is_floating_point()),
        key=lambda dtype: torch.finfo(dtype).eps,
    )


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
) -> dict[str, Verdict]:
    """Judge every tensor of ``outputs``, each by the rule for its kind.

    Args:
        slot: cmp, sel, win or combine (a selection has no golden tensor: verify.regret judges it).
        inputs: the slot's tensors by the contract's names (q, k_cmp, v_cmp, k, v, blocks, gates,
            o_cmp, ...).
        outputs: what came back: o, lse, and gradients as "d" + the input's name (dq, dk_cmp,
            dgates, do_cmp, ...).
        do: the gradient that entered backward, in o's layout; needed where outputs hold gradients.
        rows: judge these query rows only (all key rows of dk, dv are judged; ``do`` must then be 0
            elsewhere).

    Returns:
        A verdict per output; its ``where`` is (batch entry, head, row) without the batch entry when
        packed, a row being a token or key (with ``rows``, still the token's own index), or a joined
        row of gates.

    Raises:
        InvalidInput: unknown slot, a missing input, an output without a rule, gradients without
            ``do``, or ``do`` not zero outside ``rows``; or S is so long that only sampled ``rows``
            can be judged.
    """
    what = ("judge_slot", slot, geometry, scale, tuple(inputs), tuple(outputs))
    read = (*inputs.values(), *outputs.values(), cu_seqlens, do, rows)
    return recall(
        what,
        read,
        lambda: _judge_slot(slot, inputs, outputs, geometry, scale, cu_seqlens, do, rows),
    )


def _judge_slot(
    slot: str,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    geometry: BlockGeometry,
    scale: float,
    cu_seqlens: torch.Tensor | None,
    do: torch.Tensor | None,
    rows: Sequence[int] | torch.Tensor | None,
) -> dict[str, Verdict]:
    given = _ordered(slot, inputs, outputs, do)
    picked = None if rows is None else torch.as_tensor(rows, dtype=torch.long).unique()
    if do is not None and picked is not None:
        _refuse_do_elsewhere(do, picked)
    shared: dict[str, Any] = {"do": do}
    bound: list[Any] = list(given.values())
    if slot != "combine":
        bound += [geometry, scale]
        shared |= {"cu_seqlens": cu_seqlens, "rows": picked}
    dtype = path_dtype([*given.values(), *([do] if do is not None else [])])
    golden, rounded, noise = recall(
        ("truths", slot, dtype, tuple(shared)),
        [*bound, *shared.values()],
        lambda: _truths(slot, bound, shared, dtype),
    )
    verdicts = {}
    for name, actual in outputs.items():
        expected = (
            given["q" if slot != "combine" else "o_cmp"]
            if name in ("o", "lse")
            else given[name[1:]]
        )
        kind = stats_dtype(expected.dtype) if name == "lse" else expected.dtype
        if (actual.dtype, actual.device) != (kind, expected.device):
            found = f"{actual.dtype} on {actual.device}, expected {kind} on {expected.device}"
            verdicts[name] = refused(found)
        elif name == "lse":
            verdicts[name] = _judge_lse(actual, golden.lse, noise.top, dtype, picked)
        else:
            three = [x.o if name == "o" else x.grads[name] for x in (golden, rounded, noise)]
            stray = _tail(name, actual, cu_seqlens, geometry)
            verdicts[name] = (
                stray if stray is not None else _judge(name, [actual, *three], dtype, picked)
            )
    return verdicts


def _truths(
    slot: str, bound: list[Any], shared: dict[str, Any], dtype: torch.dtype
) -> tuple[Any, Any, Any]:
    """Golden, rounded (golden in float64) and magnitudes."""
    golden = getattr(oracle, slot)(*bound, **shared)
    again = getattr(attention, slot)
    rounded = (
        golden
        if dtype == torch.float64
        else again(*bound, **shared, arithmetic="rounded", dtype=dtype)
    )
    return golden, rounded, again(*bound, **shared, arithmetic="magnitude")


def _ordered(
    slot: str,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    do: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    if slot not in _INPUTS:
        raise InvalidInput(
            f"slot must be one of {', '.join(_INPUTS)}, got {slot!r}; judge_selection judges select"
        )
    missing = [name for name in _INPUTS[slot] if name not in inputs]
    if missing:
        raise InvalidInput(
            f"judging {slot} needs {', '.join(missing)}, got {', '.join(inputs) or 'nothing'}"
        )
    gradients = [f"d{name}" for name in _INPUTS[slot] if name != "blocks"]
    known = {"o", *gradients} | ({"lse"} if slot != "combine" else set())
    unknown = [name for name in outputs if name not in known]
    if unknown:
        raise InvalidInput(
            f"{slot} has no output {', '.join(unknown)}; it has {', '.join(sorted(known))}"
        )
    if do is None and any(name in gradients for name in outputs):
        raise InvalidInput(f"gradients of {slot} are judged for a given do, got None")
    return {name: inputs[name] for name in _INPUTS[slot]}


def _refuse_do_elsewhere(do: torch.Tensor, rows: torch.Tensor) -> None:
    rest = torch.ones(do.shape[-3], dtype=torch.bool, device=do.device)
    rest[rows.to(do.device)] = False
    if bool(do[..., rest, :, :].any()):
        raise InvalidInput(
            "do must be 0 outside the sampled rows, or dk and dv would hold the other rows' share"
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
    return _renamed(verdict, rows, golden.dim() - 1)


def _tail(
    name: str, actual: torch.Tensor, cu_seqlens: torch.Tensor | None, geometry: BlockGeometry
) -> Verdict | None:
    """The verdict on gradients of packed compressed rows that no document owns, unless they are
    exactly zero.
    """
    if cu_seqlens is None or name not in ("dk_cmp", "dv_cmp"):
        return None
    owned = int(compressed_starts(cu_seqlens.cpu().long(), geometry)[-1])
    stray = actual[owned:].ne(0).any(-1).nonzero()
    if not len(stray):
        return None
    row, head = (int(i) for i in stray[0])
    return refused(
        "a gradient that is not exactly 0 in a row no document owns", (head, owned + row)
    )


def _judge(
    name: str, tensors: list[torch.Tensor], dtype: torch.dtype, rows: torch.Tensor | None
) -> Verdict:
    """tensors: actual, golden, rounded, magnitude in the contract's layout."""
    if tensors[0].shape != tensors[1].shape:
        return refused(f"shape {tuple(tensors[0].shape)}, expected {tuple(tensors[1].shape)}")
    sampled = rows if name in _PER_TOKEN else None
    if sampled is not None:
        tensors = [x[..., sampled.to(x.device), :, :] for x in tensors]
    actual, golden, rounded, magnitude = (
        gate_rows(x) if name == "dgates" else heads_first(x) for x in tensors
    )
    verdict = judge(actual, golden, rounded, magnitude, dtype, grad=name != "o")
    return (
        verdict
        if sampled is None or name == "dgates"
        else _renamed(verdict, sampled, golden.dim() - 2)
    )


def _renamed(verdict: Verdict, rows: torch.Tensor, axis: int) -> Verdict:
    """``verdict`` with its row, index ``axis`` of ``where``, named by the token instead of its
    place among ``rows``.
    """
    if not verdict.where:
        return verdict
    where = (*verdict.where[:axis], int(rows[verdict.where[axis]]), *verdict.where[axis + 1 :])
    return dataclasses.replace(
        verdict, where=where, why=verdict.why.replace(str(verdict.where), str(where))
    )
