"""The kernel of a slot in a plan: a slot operator with the constants of a layer bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_core.torch_ops import autograd
from nsa_core.torch_ops.packing_checks import packed_total
from nsa_core.torch_ops.slot_op import operator_of


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel of a slot in a plan: a backend's operator with the layer's constants bound.

    Attributes:
        backend: Name of the backend.
        slot: The slot.
        op: The overload of its forward operator.
        scale: Softmax scale.
        geometry: The block sizes, as BlockGeometry.as_ints() gives them.
        deterministic: Whether every run must give the same bits.
        partial: Whether calls may pass ``first_query``.
        causal: Of sel: a kernel of causal attention, for sequences of at most n * l' tokens. It is
            the kernel of win of the same backend with a window of n * l' tokens. None: the backend
            has none, or refuses the window.
    """

    backend: str
    slot: str
    op: Any
    scale: float
    geometry: tuple[int, ...]
    deterministic: bool
    partial: bool = False
    causal: Kernel | None = None

    def __call__(
        self,
        *tensors: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        first_query: int | None = None,
    ) -> Any:
        """Run the slot.

        Args:
            *tensors: Its inputs in order; :mod:`nsa_core.contract` gives their shapes.
            cu_seqlens: int32 [documents + 1], first token of each document, for packed calls.
            max_seqlen: Length of the longest sequence, or an upper bound; None: the tokens of the
                given keys.
            first_query: Position of row 0 of q, for queries that begin inside a sequence; None: q
                holds whole sequences.

        Raises:
            InvalidInput: Shapes, dtypes or devices do not fit together, or ``first_query`` is given
                although the plan is not partial.
            NSAError: The backend raised or returned a wrong result; the message names it.
        """
        if first_query is not None and not self.partial:
            raise InvalidInput(
                f"first_query is {first_query}, but the plan is for whole sequences: resolve it"
                " with partial=True"
            )
        if max_seqlen is None:
            max_seqlen = self._longest(tensors, cu_seqlens is not None, first_query)
        if autograd.is_unobserved(*tensors, cu_seqlens) and type(max_seqlen) is int:
            return operator_of(self.op).direct(
                *tensors, cu_seqlens, *self.tail(max_seqlen, first_query)
            )
        return self.op(
            *tensors,
            cu_seqlens,
            max_seqlen,
            self.scale,
            list(self.geometry),
            self.deterministic,
            first_query,
        )

    def direct(self) -> Callable[..., Any]:
        """Return a function that runs the slot below autograd.

        It takes the tensors, and the keywords cu_seqlens and max_seqlen; for calls that are
        autograd.is_unobserved().
        """
        forward, constants = operator_of(self.op).forward, self.tail(0)[1:]

        def run(*tensors: torch.Tensor, cu_seqlens: torch.Tensor | None, max_seqlen: int) -> Any:
            return forward(*tensors, cu_seqlens, max_seqlen, *constants)

        return run

    def tail(self, max_seqlen: int, first_query: int | None = None) -> tuple[Any, ...]:
        """Return the arguments of the operator after cu_seqlens, for a call without dispatcher."""
        return (max_seqlen, self.scale, self.geometry, self.deterministic, first_query)

    def _longest(
        self, tensors: Sequence[torch.Tensor], packed: bool, first_query: int | None
    ) -> int:
        """Return an upper bound of the length of a sequence, from the shapes."""
        if not packed:
            return tensors[0].shape[1] + (first_query or 0)
        geometry = BlockGeometry.from_ints(self.geometry)
        total = packed_total(self.slot, tensors, geometry, first_query)
        return total.stop - 1 if isinstance(total, range) else total
