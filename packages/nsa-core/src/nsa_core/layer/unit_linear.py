"""Linear layers that initialise themselves, and not by the module that holds them."""

from __future__ import annotations

import torch
from torch import nn


class UnitLinear(nn.Linear):
    """An nn.Linear that is initialised to outputs of one variance for unit-variance inputs.

    Frameworks that build a model on the meta device call ``reset_parameters`` of every module, of
    outer modules first. So each layer must initialise its own parameters.

    Args:
        in_features: Width of the inputs.
        out_features: Width of the outputs.
        bias: Whether there is a bias, initially 0.
        gain: Initial standard deviation of the outputs.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, gain: float = 1.0
    ) -> None:
        self.gain = gain  # first, because the constructor calls reset_parameters
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Initialise the weight to normal values and the bias to 0."""
        nn.init.normal_(self.weight, std=self.gain * self.in_features**-0.5)
        if isinstance(self.bias, torch.Tensor):
            nn.init.zeros_(self.bias)
