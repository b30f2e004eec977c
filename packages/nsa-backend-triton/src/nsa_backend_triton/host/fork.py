"""Run independent kernels beside each other.

The kernels of a short sequence have too few programs to occupy the GPU. In a CUDA graph, kernels of
several streams start together and share it. Outside of a graph, the calls of a short sequence are
limited by the host, and a second stream would add to its work. So only a captured stream is forked.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class _Streams(threading.local):
    """The streams of this thread by device: two captures at a time must not share one."""

    def __init__(self) -> None:
        self.of_device: dict[torch.device, list[torch.cuda.Stream]] = {}


_streams = _Streams()


class Fork:
    """A context with streams beside the current stream of ``device``, if that is being captured.

    At its end, also after an error, the current stream waits for the kernels of all blocks.
    Otherwise the capture could not end, and its own error would hide the first one.

    Attributes:
        active: whether the kernels of :meth:`beside` run on other streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._used, self._kept = device, 0, list[object]()
        self.active = device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def __enter__(self) -> Fork:
        """Return the fork."""
        return self

    def __exit__(self, *error: object) -> None:
        """Join the streams."""
        self.join()

    def join(self) -> None:
        """Let the current stream wait for the kernels of all blocks so far."""
        for number in range(self._used):
            torch.cuda.current_stream(self._device).wait_stream(self._stream(number))
        self._used = 0
        self._kept.clear()

    @contextlib.contextmanager
    def beside(self, *tensors: object) -> Iterator[None]:
        """Launch the kernels of the block beside those that the caller launches after it.

        They run after all kernels that the current stream has so far. The block must not allocate
        tensors: their memory would belong to the other stream, which could reuse it while the
        current stream still reads it.

        Args:
            *tensors: Tensors that the kernels read or write, kept until the fork ends. Otherwise
                the current stream could write to the memory of a temporary tensor while they use
                it. Tensors that live until then anyway may be left out.
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

    def _stream(self, number: int) -> torch.cuda.Stream:
        streams = _streams.of_device.setdefault(self._device, [])
        while len(streams) <= number:
            streams.append(torch.cuda.Stream(self._device))
        return streams[number]
