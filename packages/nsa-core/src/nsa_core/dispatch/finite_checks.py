"""Plans whose outputs are looked at: the first value that is not finite is an error that names its
branch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from nsa_core.errors import NSAError

if TYPE_CHECKING:
    from nsa_core.dispatch.plan import Plan


@dataclasses.dataclass(frozen=True)
class CheckedKernel:
    """A kernel whose output must be finite (the LSE may be -inf: nothing visible)."""

    kernel: Any
    layer: str | int | None

    def __call__(self, *tensors: torch.Tensor, **packing: Any) -> Any:
        """Run the kernel.

        Raises:
            NSAError: the output has NaN or Inf; names layer, branch and backend.
        """
        result = self.kernel(*tensors, **packing)
        o = result[0] if isinstance(result, tuple) else result
        if not torch.isfinite(o).all():
            bad = (~torch.isfinite(o)).nonzero()
            at_fault = (
                " (its inputs are finite)" if all(torch.isfinite(t).all() for t in tensors) else ""
            )
            raise NSAError(
                f"layer {self.layer}, branch {self.kernel.slot!r}, backend {self.kernel.backend!r}:"
                f" {len(bad)} values of {list(o.shape)} are not finite, the first at"
                f" {bad[0].tolist()}{at_fault}"
            )
        return result


def checked_plan(plan: Plan, layer: str | int | None) -> Plan:
    """``plan`` with every output of cmp, sel, win and combine checked for NaN and Inf, named after
    ``layer``.
    """
    kernels: dict[str, Any] = {
        s: CheckedKernel(getattr(plan, s), layer) for s in ("cmp", "sel", "win", "combine")
    }
    return dataclasses.replace(plan, **kernels)
