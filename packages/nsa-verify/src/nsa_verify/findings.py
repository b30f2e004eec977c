"""Finding: what one comparison found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nsa_core.dtypes import dtype_name
from nsa_verify.cases import Case
from nsa_verify.judge.tensor import LIMITS, LSE_LIMIT, Verdict


@dataclasses.dataclass(frozen=True)
class Finding:
    """One comparison. ``ok`` None: not applicable here, ``detail`` says why.

    ``row``, ``elem`` and ``bias`` are the verdict's errors in units of rounding noise, as parts of
    their limits (1.0 is the limit); None where the check demands equal bits.
    """

    check: str
    slot: str
    case: str
    dtype: str
    quantity: str
    ok: bool | None
    row: float | None = None
    elem: float | None = None
    bias: float | None = None
    detail: str = ""


def judged(
    check: str, slot: str, case: Case, dtype: torch.dtype, verdicts: Mapping[str, Verdict]
) -> Iterator[Finding]:
    """A finding per verdict, its errors as parts of their limits."""
    limits = LIMITS[dtype]
    for quantity, v in verdicts.items():
        most = LSE_LIMIT if quantity == "lse" else limits.elem
        parts = (v.row / limits.row, v.elem / most, v.bias)
        yield Finding(
            check, slot, case.name, dtype_name(dtype), quantity, v.ok, *parts, detail=v.why
        )


def same_bits(
    check: str,
    slot: str,
    case: Case,
    dtype: torch.dtype,
    quantity: str,
    got: torch.Tensor,
    want: torch.Tensor,
) -> Finding:
    """A finding that demands equal bits (NaN equals NaN)."""
    equal = (
        got.shape == want.shape
        and got.dtype == want.dtype
        and bool(torch.equal(bits(got), bits(want)))
    )
    detail = ""
    if not equal and got.shape == want.shape:
        differ = bits(got) != bits(want)
        first = tuple(int(i) for i in differ.nonzero()[0])
        detail = f"{int(differ.sum())} of {differ.numel()} elements differ, first at {first}"
    elif not equal:
        detail = f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    return Finding(check, slot, case.name, dtype_name(dtype), quantity, equal, detail=detail)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as integers of its width; -0.0 counts as 0.0."""
    if not tensor.is_floating_point():
        return tensor
    kinds: dict[int, Any] = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return (tensor + 0.0).contiguous().view(kinds[tensor.element_size()])
