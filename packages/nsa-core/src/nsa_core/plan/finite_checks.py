"""Checked plans: a NaN or Inf in an output of a slot raises an error that names the branch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from nsa_core.errors import NSAError

if TYPE_CHECKING:
    from nsa_core.plan.plan import Plan


@dataclasses.dataclass(frozen=True)
class CheckedKernel:
    """A kernel that raises if its output o has NaN or Inf.

    The log-sum-exp is not checked: it is -inf where no key is visible.
    """

    kernel: Any
    layer: str | int | None

    @property
    def causal(self) -> CheckedKernel | None:
        """The causal kernel of sel, checked likewise; None if the kernel has none."""
        causal = getattr(self.kernel, "causal", None)
        return None if causal is None else CheckedKernel(causal, self.layer)

    def __call__(self, *tensors: torch.Tensor, **packing: Any) -> Any:
        """Run the kernel.

        Raises:
            NSAError: The output has NaN or Inf; the message names layer, branch and backend.
        """
        result = self.kernel(*tensors, **packing)
        o = result[0] if isinstance(result, tuple) else result
        if not torch.isfinite(o).all():
            positions = (~torch.isfinite(o)).nonzero()
            finite_inputs = (
                " (its inputs are finite)" if all(torch.isfinite(t).all() for t in tensors) else ""
            )
            layer = "" if self.layer is None else f"layer {self.layer}, "
            raise NSAError(
                f"{layer}branch {self.kernel.slot!r}, backend {self.kernel.backend!r}:"
                f" {len(positions)} values of the output {list(o.shape)} are not finite, the first"
                f" at index {positions[0].tolist()}{finite_inputs}"
            )
        return result


def checked_plan(plan: Plan, layer: str | int | None) -> Plan:
    """Return ``plan`` with the outputs of cmp, sel, win and combine checked for NaN and Inf.

    Args:
        plan: The plan to check.
        layer: Name or index of the layer, for error messages.
    """
    kernels: dict[str, Any] = {
        s: CheckedKernel(getattr(plan, s), layer) for s in ("cmp", "sel", "win", "combine")
    }
    return dataclasses.replace(plan, **kernels)
