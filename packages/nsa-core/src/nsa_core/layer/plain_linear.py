"""Checks that a module computes exactly what its class defines.

Some code reads the parameters of a linear layer and computes the product in a faster form. That
form is correct only for plain layers. A wrapped, hooked or parametrised layer must be called as a
module.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from nsa_core.dtypes import FLOATING

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


def are_plain_linear(*layers: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
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


def base_weight(layer: nn.Module) -> torch.Tensor | None:
    """Return the weight of ``layer``, or else its largest parameter or buffer; None if it has none.

    Reading ``weight`` of a parametrised layer would compute it. The largest tensor of a LoRA
    wrapper is the base layer's weight. It may be quantised.
    """
    weight = layer._parameters.get("weight")
    if weight is not None:
        return weight
    tensors = [*layer.parameters(), *layer.buffers()]
    attribute = None if tensors else getattr(layer, "weight", None)  # FSDP1 sets an attribute
    if isinstance(attribute, torch.Tensor):
        return attribute
    return max(tensors, key=torch.Tensor.numel, default=None)


def stated_dtype(weight: torch.Tensor | None) -> torch.dtype | None:
    """Return the only dtype of x that a layer takes without autocast; None if x decides.

    A plain floating-point weight states the dtype. A quantised layer computes in the dtype of x,
    whatever dtype its tensors or adapters have.

    Args:
        weight: the :func:`base_weight` of the layer.
    """
    if weight is None or type(weight) not in PLAIN_TENSORS or weight.dtype not in FLOATING:
        return None
    return weight.dtype
