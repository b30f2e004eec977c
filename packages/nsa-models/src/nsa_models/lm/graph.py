"""Forward and backward of one batch as a CUDA graph: one launch in place of thousands."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from nsa_models.lm.data import Batch

Work = Callable[[Batch], torch.Tensor]
_WARM_UP = 3


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Batch
    result: torch.Tensor


class Graphed:
    """``work`` on batches, captured at the first call of a shape and replayed after it.

    ``work`` leaves gradients at ``parameters`` and returns a tensor. Here the gradients keep their
    memory, whichever graph ran: a call writes them, or with ``add`` adds to them.
    """

    def __init__(self, work: Work, parameters: list[torch.nn.Parameter]) -> None:
        self._work, self._parameters = work, parameters
        self._captured: dict[tuple[object, ...], _Captured] = {}

    def __call__(self, batch: Batch, add: bool = False) -> torch.Tensor:
        """What ``work`` returns for ``batch``."""
        bounds = None if batch.cu_seqlens is None else batch.cu_seqlens.shape
        key = (batch.tokens.shape, bounds, batch.max_seqlen, add)
        if key not in self._captured:
            self._captured[key] = self._capture(batch, add)
        captured = self._captured[key]
        for target, source in zip(captured.inputs[:3], batch[:3]):
            if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
                target.copy_(source)
        captured.graph.replay()
        return captured.result.clone()

    def _capture(self, batch: Batch, add: bool) -> _Captured:
        bounds = None if batch.cu_seqlens is None else batch.cu_seqlens.clone()
        inputs = Batch(
            batch.tokens.clone(), batch.targets.clone(), bounds, batch.max_seqlen, batch.counted
        )
        sums = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._without_gradients()
                self._work(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self._without_gradients()
        with torch.cuda.graph(graph):
            result = self._work(inputs)
            # Here, in a few launches for all: adding to a gradient that is there is a launch a
            # parameter.
            pairs = [
                (total, p.grad) for total, p in zip(sums, self._parameters) if p.grad is not None
            ]
            totals, made = [total for total, _ in pairs], [gradient for _, gradient in pairs]
            if add:
                torch._foreach_add_(totals, made)
            else:
                torch._foreach_copy_(totals, made)
        for parameter, total in zip(self._parameters, sums):
            parameter.grad = total
        return _Captured(graph, inputs, result)

    def _without_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
