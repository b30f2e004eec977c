"""Finding: the result of one comparison. Findings: makes those of one check."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nsa_core.dtypes import dtype_name
from nsa_verify.judge.selection import MAX_REGRET, SelectionVerdict
from nsa_verify.judge.tensor import LIMITS, LSE_LIMIT, Verdict
from nsa_verify.problems.cases import Case


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one comparison.

    Attributes:
        check: Name of the check.
        slot: Slot under test; "" or "whole" for a comparison of a layer or of all slots.
        case: Name of the case.
        dtype: Name of the dtype.
        quantity: The compared tensor or property.
        ok: Whether the comparison passed; None if it does not apply (see ``detail``).
        row: Row error of the verdict divided by its limit; None if equal bits are required.
        elem: Element error divided by its limit; None if equal bits are required.
        bias: Bias divided by its limit; None if equal bits are required, or if few rows exceed it.
        detail: Reason of a failure, or of a comparison that does not apply.
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


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a floating tensor as integers of its width, with -0.0 as 0.0."""
    if not tensor.is_floating_point():
        return tensor
    kinds: dict[int, Any] = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return (tensor + 0.0).contiguous().view(kinds[tensor.element_size()])


@dataclasses.dataclass(frozen=True)
class Findings:
    """Makes the findings of one check on one case in one dtype.

    Attributes:
        check: Name of the check.
        case: The case.
        dtype: Dtype of q, k and v.
    """

    check: str
    case: Case
    dtype: torch.dtype

    def finding(
        self, slot: str, quantity: str, ok: bool | None, row: float | None = None, detail: str = ""
    ) -> Finding:
        """Return a finding with these attributes of :class:`Finding`."""
        name = dtype_name(self.dtype)
        return Finding(self.check, slot, self.case.name, name, quantity, ok, row, detail=detail)

    def same_bits(
        self, slot: str, quantity: str, actual: torch.Tensor, expected: torch.Tensor
    ) -> Finding:
        """Compare two tensors bit for bit; NaN equals NaN, and -0.0 equals 0.0."""
        equal = (
            actual.shape == expected.shape
            and actual.dtype == expected.dtype
            and bool(torch.equal(bits(actual), bits(expected)))
        )
        detail = ""
        if not equal and actual.shape == expected.shape:
            differ = bits(actual) != bits(expected)
            first = tuple(int(i) for i in differ.nonzero()[0])
            detail = f"{int(differ.sum())} of {differ.numel()} elements differ, first at {first}"
        elif not equal:
            detail = f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        return self.finding(slot, quantity, equal, detail=detail)

    def filled(self, slot: str, quantity: str, actual: torch.Tensor, value: float) -> Finding:
        """Compare every element of a tensor with ``value``, bit for bit."""
        return self.same_bits(slot, quantity, actual, torch.full_like(actual, value))

    def judged(self, slot: str, verdicts: Mapping[str, Verdict]) -> Iterator[Finding]:
        """Yield one finding per verdict, with errors divided by their limits."""
        limits = LIMITS[self.dtype]
        for quantity, v in verdicts.items():
            elem_limit = LSE_LIMIT if quantity == "lse" else limits.elem
            errors: dict[str, Any] = {
                "row": v.row / limits.row,
                "elem": v.elem / elem_limit,
                "bias": v.bias,
            }
            finding = self.finding(slot, quantity, v.ok, detail=v.why)
            yield dataclasses.replace(finding, **errors)

    def selected(self, slot: str, verdict: SelectionVerdict, place: str = "") -> Finding:
        """Return the finding of a selection; ``place`` names where a rule is broken."""
        detail = (
            verdict.why + place
            or f"regret {verdict.regret:.2g}, {verdict.flip_rate:.2%} of sets are not the oracle's"
        )
        return self.finding(slot, "blocks", verdict.ok, verdict.regret / MAX_REGRET, detail)
