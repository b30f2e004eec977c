"""Checks that a module computes exactly what its class defines.

Some code reads the parameters of a linear layer and computes the product in a faster form. That
form is correct only for plain layers. A wrapped, hooked or parametrised layer must be called as a
module.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from nsa_core.errors import InvalidInput

PLAIN_TENSORS = (nn.Parameter, torch.Tensor)  # torch.func.functional_call sets tensors


def are_plain(kind: type[nn.Module], *modules: nn.Module) -> bool:
    """Whether every module computes the forward of class ``kind``, without hooks.

    A subclass without a forward of its own is plain: some trainers change the class of every
    module. Global hooks count as hooks. One call checks several modules, because every forward pass
    and every decode step calls this function.
    """
    if _has_any_global_hook():
        return False
    for module in modules:
        if (
            (type(module) is not kind and type(module).forward is not kind.forward)
            or module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or "forward" in module.__dict__
        ):
            return False
    return True


def are_plain_linear(*layers: nn.Module, kind: type[nn.Linear] = nn.Linear) -> bool:
    """Whether every layer is plain and has a weight and a bias that are plain tensors.

    Subclasses of torch.Tensor, such as DTensor and quantised tensors, define their own product. A
    parametrised layer has no parameter ``weight``.
    """
    if not are_plain(kind, *layers):
        return False
    for layer in layers:
        parameters = layer._parameters
        for name in ("weight", "bias"):
            if type(parameters.get(name)) not in PLAIN_TENSORS:
                return False
    return True


def dtype_and_device_from(layer: nn.Module) -> torch.Tensor:
    """A tensor with the dtype and device of ``layer``: its weight, or else its largest
    floating-point parameter.

    Reading ``weight`` of a parametrised layer would compute it. The largest parameter of a LoRA
    wrapper is the base layer's weight.

    Raises:
        InvalidInput: The layer has no floating-point parameter, for example because it is
            quantised.
    """
    weight = layer._parameters.get("weight")
    if weight is not None and weight.is_floating_point():
        return weight
    floating = [p for p in layer.parameters() if p.is_floating_point()]
    attribute = None if floating else getattr(layer, "weight", None)
    if isinstance(attribute, torch.Tensor) and attribute.is_floating_point():
        floating = [nn.Parameter(attribute.detach(), requires_grad=False)]
    if not floating:
        raise InvalidInput(
            f"{type(layer).__name__} has no floating-point parameter, so the dtype of the attention"
            " layer is unknown: keep the weight of this layer in a floating-point dtype"
        )
    return max(floating, key=torch.Tensor.numel)
