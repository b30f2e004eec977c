"""Checked plans: a NaN or Inf in an output of a slot raises an error that names the branch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from nsa_core.errors import NSAError
from nsa_core.torch_ops.schema import INPUTS

if TYPE_CHECKING:
    from nsa_core.plan.plan import Plan


@dataclasses.dataclass(frozen=True)
class CheckedKernel:
    """A kernel that raises if its output o has NaN or Inf.

    The message also has the first place of NaN or Inf in each input: that of a key or value may
    reach earlier rows of o. The log-sum-exp is not checked: it is -inf where no key is visible.
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
            NSAError: The output has NaN or Inf; the message names layer, branch and backend, and
                the inputs that are not finite.
        """
        result = self.kernel(*tensors, **packing)
        o = result[0] if isinstance(result, tuple) else result
        if not torch.isfinite(o).all():
            positions = _not_finite(o)
            first_of = {
                name: index[0].tolist()
                for name, tensor in zip(INPUTS[self.kernel.slot], tensors)
                if len(index := _not_finite(tensor))
            }
            inputs = "its inputs are finite"
            if first_of:
                places = (f"{name} from index {index}" for name, index in first_of.items())
                inputs = f"of its inputs, these are not finite: {', '.join(places)}"
            layer = "" if self.layer is None else f"layer {self.layer}, "
            raise NSAError(
                f"{layer}branch {self.kernel.slot!r}, backend {self.kernel.backend!r}:"
                f" {len(positions)} values of the output {list(o.shape)} are not finite, the first"
                f" at index {positions[0].tolist()}; {inputs}"
            )
        return result


def _not_finite(x: torch.Tensor) -> torch.Tensor:
    """Return the indices of the numbers of ``x`` that are not finite, int64 [count, axes]."""
    x = x.float() if x.itemsize == 1 else x  # torch.isfinite does not take fp8
    return (~torch.isfinite(x)).nonzero()


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
