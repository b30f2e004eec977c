"""Run kernels that do not depend on each other beside each other.

In a short sequence a kernel has fewer programs than the GPU has room for. In a CUDA graph, kernels
of several streams start together and share the GPU. Outside of a graph the calls of a short
sequence wait for the host, which a second stream would only give more to do. So only a captured
stream is forked.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from nsa_core.torch_ops.torch_state import is_capturing


class _Streams(threading.local):
    """The streams of this thread by device: two captures at a time must not share one."""

    def __init__(self) -> None:
        self.of_device: dict[torch.device, list[torch.cuda.Stream]] = {}


_streams = _Streams()


class Fork:
    """Streams beside the current stream of ``device``, if that is being captured.

    Attributes:
        active: whether the kernels of :meth:`beside` run on other streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._used, self._kept = device, 0, list[object]()
        self.active = is_capturing(device)

    @contextlib.contextmanager
    def beside(self, *tensors: object) -> Iterator[None]:
        """Launch the kernels of the block beside those that the caller launches after it.

        They run after all kernels that the current stream has so far. Nothing may be allocated in
        the block: other streams would take the memory for free before its kernels have run.

        Args:
            *tensors: What the kernels read and write, kept until :meth:`join`; else the current
                stream could write to the memory of a temporary tensor while they use it.
        """
        if not self.active:
            yield
            return
        stream = self._stream(self._used)
        self._used += 1
        self._kept += tensors
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for the kernels of all blocks."""
        for number in range(self._used):
            torch.cuda.current_stream(self._device).wait_stream(self._stream(number))
        self._used = 0
        self._kept.clear()

    def _stream(self, number: int) -> torch.cuda.Stream:
        streams = _streams.of_device.setdefault(self._device, [])
        while len(streams) <= number:
            streams.append(torch.cuda.Stream(self._device))
        return streams[number]
