"""Forward and backward of one batch as a CUDA graph: one launch instead of thousands."""

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


class GraphedWork:
    """Run ``work`` on batches as CUDA graphs, captured at the first call with each shape.

    The gradients of ``parameters`` keep their memory across graphs. A call overwrites them, or adds
    to them if ``add`` is True.

    Args:
        work: Computes gradients of ``parameters`` from a batch, and returns a tensor.
        parameters: The parameters that ``work`` differentiates.
    """

    def __init__(self, work: Work, parameters: list[torch.nn.Parameter]) -> None:
        self._work, self._parameters = work, parameters
        self._captured: dict[tuple[object, ...], _Captured] = {}

    def __call__(self, batch: Batch, add: bool = False) -> torch.Tensor:
        """Run ``work`` on a batch and return its result."""
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
        buffers = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._clear_gradients()
                self._work(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self._clear_gradients()
        with torch.cuda.graph(graph):
            result = self._work(inputs)
            # Accumulate with a few launches for all parameters. Accumulating into existing
            # gradients would take one launch per parameter.
            pairs = [
                (buffer, p.grad)
                for buffer, p in zip(buffers, self._parameters)
                if p.grad is not None
            ]
            totals, gradients = [buffer for buffer, _ in pairs], [gradient for _, gradient in pairs]
            if add:
                torch._foreach_add_(totals, gradients)
            else:
                torch._foreach_copy_(totals, gradients)
        for parameter, buffer in zip(self._parameters, buffers):
            parameter.grad = buffer
        return _Captured(graph, inputs, result)

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
