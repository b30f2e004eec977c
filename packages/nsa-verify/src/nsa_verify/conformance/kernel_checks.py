"""Checks of a kernel under compilation, CUDA graphs, long offsets, threads and grad modes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nsa_core.contract import Request, import_named
from nsa_core.dryrun import call_slot, slot_inputs
from nsa_core.errors import NSAError
from nsa_core.torch_ops.slot_op import slot_op
from nsa_verify.conformance.points import Point
from nsa_verify.conformance.slot_under_test import SlotUnderTest, faults
from nsa_verify.problems.findings import bits
from nsa_verify.problems.slot_runs import SlotRun, run_kernel

FAR = 2**31 + 128  # elements between two batch entries: more than a 32-bit offset can address
_UNDIFFERENTIATED = ("blocks", "lse")


class KernelChecks:
    """The checks of one slot at one point; each yields one line per fault.

    Args:
        subject: The slot.
        point: The point.
        grad: Whether to compute gradients.
        seed: Seed of the tensors.
    """

    def __init__(self, subject: SlotUnderTest, point: Point, grad: bool, seed: int = 0) -> None:
        self._subject, self._point, self._grad = subject, point, grad
        self._data, self._inputs = subject.data(point, seed)
        self._do = self._data.do if grad else None
        self._on_gpu = torch.device(subject.device).type == "cuda"

    def _run(self, changed: Mapping[str, torch.Tensor] | None = None) -> SlotRun:
        """Run the kernel with some inputs replaced."""
        inputs = {**self._inputs, **(changed or {})}
        return self._subject.run(self._point, inputs, self._do, self._data)

    def _faults(self, run: SlotRun) -> list[str]:
        return faults(self._subject.slot, self._point.case, run, self._data)

    def operator(self) -> Iterator[str]:
        """Run torch.library.opcheck, which includes the backward under aot_autograd.

        opcheck raises an error for a fault. The backward operator is not checked alone: opcheck
        would run it under a dispatch mode, and a backward may use torch.func.vjp, which fails in
        that mode.
        """
        subject, data, kernel = self._subject, self._data, self._subject.kernel(self._point)
        op = slot_op(subject.entry.name, subject.slot, subject.spec)
        leaves = [
            t.clone().requires_grad_(self._grad and n not in _UNDIFFERENTIATED)
            for n, t in self._inputs.items()
        ]
        constants = (kernel.scale, list(kernel.geometry), kernel.deterministic)
        first_query = None  # whole sequences
        torch.library.opcheck(
            op.op, (*leaves, data.cu_seqlens, data.max_seqlen, *constants, first_query)
        )
        yield from ()

    def compiled(self) -> Iterator[str]:
        """Judge torch.compile(fullgraph=True), with aot_eager on the CPU and inductor elsewhere."""
        kernel = self._subject.kernel(self._point)
        torch._dynamo.reset()
        backend = "inductor" if self._on_gpu else "aot_eager"
        call: Any = torch.compile(lambda *x, **y: kernel(*x, **y), backend=backend, fullgraph=True)
        call.slot = self._subject.slot
        yield from self._faults(run_kernel(call, self._inputs, self._do, self._data))

    def cuda_graph(self) -> Iterator[str]:
        """Check that a graph replayed on new inputs equals eager bit for bit (fault row 50)."""
        kernel = self._subject.kernel(self._point)
        static = {n: t.clone() for n, t in self._inputs.items()}
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            kernel(*static.values())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            captured = kernel(*static.values())
        _, fresh = self._subject.data(self._point, seed=7)
        for name, tensor in static.items():
            tensor.copy_(fresh[name])
        graph.replay()
        with torch.no_grad():
            eager = kernel(*fresh.values())
        for index, (actual, expected) in enumerate(zip(_tuple(captured), _tuple(eager))):
            if not torch.equal(bits(actual), bits(expected)):
                yield f"result {index} of the replayed graph differs from eager"

    def long_offsets(self) -> Iterator[str]:
        """Judge inputs with batch entries more than 2^31 elements apart, in turn (fault row 43)."""
        for name in [n for n in self._inputs if n not in _UNDIFFERENTIATED]:
            run = self._run({name: _far(self._inputs[name])})
            yield from (f"{name}: {fault}" for fault in self._faults(run))
            del run
            if self._on_gpu:
                torch.cuda.empty_cache()

    def two_threads(self) -> Iterator[str]:
        """Judge two threads that make their first call at the same time (fault row 52).

        Each thread has its own inputs, and on a GPU its own stream. A deterministic kernel gives a
        thread equal bits in every call.
        """
        other = KernelChecks(self._subject, self._point, self._grad, seed=1)
        runs: dict[KernelChecks, list[SlotRun]] = {self: [], other: []}
        errors: list[Exception] = []
        barrier = threading.Barrier(2)
        if self._on_gpu:
            torch.cuda.synchronize()  # another stream wrote the inputs

        def work(checks: KernelChecks) -> None:
            try:
                barrier.wait(30)
                for _ in range(3):
                    runs[checks].append(checks._run_on_stream())
            except (NSAError, RuntimeError) as error:
                errors.append(error)  # any other error ends the thread before its last call

        threads = [threading.Thread(target=work, args=(checks,)) for checks in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield from (f"a thread ended with {error!r}" for error in errors)
        if not errors and any(len(calls) != 3 for calls in runs.values()):
            yield "a thread did not finish its three calls"
        for checks, calls in runs.items():
            for run in calls:
                yield from checks._faults(run)
                for name, tensor in run.outputs.items() if self._subject.spec.deterministic else ():
                    if not torch.equal(bits(tensor), bits(calls[0].outputs[name])):
                        yield f"{name}: its bits differ from the first call of the thread"

    def _run_on_stream(self) -> SlotRun:
        """Run the kernel, on a GPU on a stream of its own."""
        stream = torch.cuda.Stream() if self._on_gpu else None
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            run = self._run()
            if stream:
                stream.synchronize()
        return run

    def workspace(self) -> Iterator[str]:
        """Check that the stated workspace is within a factor of two of a measured one."""
        spec, request = self._subject.spec, self._subject.request(self._point, self._grad)
        assert spec.workspace is not None  # the suite tests stated ones only
        named = {name: getattr(spec, name) for name in ("forward", "backward")}
        slot = types.SimpleNamespace(**{n: import_named(p) for n, p in named.items() if p})
        arguments = (self._data.do, [*self._inputs.values()], slot_inputs(request)[2])
        run = functools.partial(call_slot, slot, request, *arguments)
        yield from workspace_faults("workspace", spec.workspace, request, run)

    def grad_modes(self) -> Iterator[str]:
        """Check that every grad mode gives equal forward bits (fault row 33)."""
        kernel = self._subject.kernel(self._point)
        with_grad = self._run().outputs
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                results = _tuple(kernel(*self._inputs.values()))
            for (name, expected), actual in zip(with_grad.items(), results):
                equal = torch.equal(bits(actual), bits(expected))
                if self._subject.spec.deterministic and not equal:
                    yield f"{name} under {mode.__name__} differs from {name} with gradients"


def workspace_faults(
    field: str, path: str, request: Request, run: Callable[[], Any], before: int = 0
) -> Iterator[str]:
    """Check that a stated workspace is within a factor of two of what ``run`` allocates.

    ``before``: bytes that exist before ``run`` and that the stated workspace includes.
    """
    run()  # libraries keep buffers from their first call on
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        run()
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in events if e.device_type().name.lower() == request.device]
    peak = before + max(itertools.accumulate(sizes), default=0)
    stated = import_named(path)(request)
    if type(stated) is not int or not peak <= 2 * stated <= 4 * peak:
        expected = f"expected {peak // 2} to {2 * peak}, because a run allocates {peak}"
        yield f"{field} {path!r} returns {stated!r} bytes; {expected}"


def _tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def _far(tensor: torch.Tensor) -> torch.Tensor:
    """Copy with batch entries that are FAR elements apart."""
    entry = tensor[0].contiguous()
    storage = tensor.new_empty(FAR * (len(tensor) - 1) + entry.numel())
    return storage.as_strided(tensor.shape, (FAR, *entry.stride())).copy_(tensor)
