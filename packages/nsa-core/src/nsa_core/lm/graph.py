"""Forward and backward of one batch as a CUDA graph: one launch in place of thousands."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nsa_core.lm.data import Batch

Work = Callable[[Batch], torch.Tensor]
_WARM_UP = 3


class Graphed:
    """``work`` on batches of one shape, captured at the first call and replayed after it.

    ``work`` adds to the gradients of ``parameters`` and returns a tensor; the gradients keep their memory, so they are
    set to zero in place, never to None.
    """

    def __init__(self, work: Work, parameters: list[torch.nn.Parameter]) -> None:
        self._work, self._parameters = work, parameters
        self._captured: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, Batch, torch.Tensor]] = {}

    def __call__(self, batch: Batch) -> torch.Tensor:
        """What ``work`` returns for ``batch``."""
        bounds = None if batch.cu_seqlens is None else batch.cu_seqlens.shape
        key = (batch.tokens.shape, bounds, batch.max_seqlen)
        if key not in self._captured:
            self._captured[key] = self._capture(batch)
        graph, inputs, result = self._captured[key]
        for target, source in zip(inputs[:3], batch[:3]):
            if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
                target.copy_(source)
        graph.replay()
        return result.clone()

    def _capture(self, batch: Batch) -> tuple[torch.cuda.CUDAGraph, Batch, torch.Tensor]:
        bounds = None if batch.cu_seqlens is None else batch.cu_seqlens.clone()
        inputs = Batch(batch.tokens.clone(), batch.targets.clone(), bounds, batch.max_seqlen, batch.counted)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        kept = [parameter.grad.clone() for parameter in self._parameters if parameter.grad is not None]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._work(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self._work(inputs)
        for parameter, before in zip(self._parameters, kept):  # what warming up has added
            assert parameter.grad is not None  # made above
            parameter.grad.copy_(before)
        return graph, inputs, result
