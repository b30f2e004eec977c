"""Generated cases and steps in which the bias of a correct kernel may exceed its limit."""

from __future__ import annotations

import dataclasses

from nsa_verify.problems.findings import Finding

# The bias is a rule for many rows. With fewer, the error of one row decides it, and that may be
# parallel to the row: the gradient of a query that sees two keys is a multiple of their difference.
MIN_ROWS = 12


def without_bias(finding: Finding) -> Finding:
    """Return ``finding``, passed if only its bias exceeds the limit."""
    if finding.ok is not False or finding.row is None or finding.elem is None:
        return finding
    within = finding.row <= 1 and finding.elem <= 1  # not of NaN
    if finding.bias is None or finding.quantity == "lse" or not within:
        return finding
    return dataclasses.replace(finding, ok=True, bias=1.0, detail="")
