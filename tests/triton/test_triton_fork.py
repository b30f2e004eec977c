"""Kernels beside each other: the streams that a captured backward takes, with fakes of CUDA's."""

from __future__ import annotations

import contextlib
import importlib
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from nsa_backend_triton.host import fork as fork_module
from nsa_backend_triton.host.fork import Fork
from slot_requests import make_request

DEVICE = torch.device("cuda", 0)


class Streams:
    """CUDA's streams, which record what waits for what and which one is current."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made = 0
        self.main = Stream(self, "main")
        self.current = self.main

    def new(self, device: torch.device) -> Stream:
        assert device == DEVICE
        self.made += 1
        return Stream(self, f"side {self.made}")

    @contextlib.contextmanager
    def enter(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: Stream) -> None:
        self.streams.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    fake = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", fake.new)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.current)
    monkeypatch.setattr(torch.cuda, "stream", fake.enter)
    monkeypatch.setattr(fork_module, "_streams", fork_module._Streams())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return fake


def test_blocks_run_on_streams_of_their_own_until_the_end(streams: Streams) -> None:
    for _ in range(2):  # the second fork takes the streams of the first
        streams.log.clear()
        names = []
        with Fork(DEVICE) as fork:
            for _ in range(2):
                with fork.beside():
                    names.append(streams.current.name)
                assert streams.current is streams.main
        assert names == ["side 1", "side 2"]
        assert streams.log == [
            "side 1 waits for main",
            "side 2 waits for main",
            "main waits for side 1",
            "main waits for side 2",
        ]


@pytest.mark.parametrize("inside", [False, True], ids=["after the block", "in the block"])
def test_an_error_leaves_no_stream_in_the_capture(streams: Streams, inside: bool) -> None:
    def fail() -> None:
        with Fork(DEVICE) as fork:
            with fork.beside():
                if inside:
                    raise MemoryError
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert streams.log == ["side 1 waits for main", "main waits for side 1"]
    assert streams.current is streams.main


def test_tensors_of_a_block_live_until_the_fork_ends(streams: Streams) -> None:
    tensor = torch.zeros(3)
    alive = weakref.ref(tensor)
    with Fork(DEVICE) as fork:
        with fork.beside(tensor, None):
            pass
        del tensor
        assert alive() is not None
    assert alive() is None


def test_threads_do_not_share_streams(streams: Streams) -> None:
    names = []

    def use() -> None:
        with Fork(DEVICE) as fork, fork.beside():
            names.append(streams.current.name)

    use()
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert names == ["side 1", "side 2"]


def test_a_stream_that_is_not_captured_is_not_forked(streams: Streams, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tensor = torch.zeros(3)
    alive = weakref.ref(tensor)
    with Fork(DEVICE) as fork:
        with fork.beside(tensor):
            assert streams.current is streams.main
        del tensor
        assert alive() is None
    assert (streams.log, streams.made) == ([], 0)


def test_a_dry_run_is_not_forked(streams: Streams) -> None:
    assert not Fork(torch.device("meta")).active


def test_sel_runs_its_tiles_beside_the_buckets_and_joins_before_their_sum(monkeypatch) -> None:
    offline, dryrun = (importlib.import_module(n) for n in ("offline", "nsa_core.dryrun"))
    forward = importlib.import_module("nsa_backend_triton.sel.forward")
    request = make_request("sel", 8192, n_heads=12, n_kv_heads=2, needs_grad=False, capability=None)
    side: list[str] = []
    joined: list[list[str]] = []

    class Recorder(Fork):
        @contextlib.contextmanager
        def beside(self, *tensors: object) -> Iterator[None]:
            before = len(launches)
            yield
            side.extend(launch.name for launch in launches[before:])

        def join(self) -> None:
            joined.append([launch.name for launch in launches])

    monkeypatch.setattr(forward, "Fork", Recorder)
    _, tensors, call = dryrun.slot_inputs(request)
    with offline.recording(90) as launches:
        forward.forward(*tensors, call=call)
    assert side == ["sel_forward_kernel"]
    assert joined[0][-1] == "sel_bucket_kernel"
    assert "sel_merge_kernel" not in joined[0]
    assert launches[-1].name == "sel_merge_kernel"
