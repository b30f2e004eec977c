"""Checks of a kernel under compilation, CUDA graphs, memory layouts, long offsets and threads.

Each check takes a slot under test, a point of the grid and whether to compute gradients. It yields
one line per fault.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nsa_core.errors import NSAError
from nsa_core.torch_ops.slot_op import slot_op
from nsa_verify.conformance.grid import Point
from nsa_verify.conformance.slot_under_test import SlotUnderTest, faults
from nsa_verify.problems.cases import CaseData
from nsa_verify.problems.findings import bits
from nsa_verify.problems.slot_runs import SlotRun

Check = Callable[[SlotUnderTest, Point, bool], Iterator[str]]
FAR = 2**31 + 128  # elements between two batch entries: more than a 32-bit offset can address


def correct(subject: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """Check that outputs, LSE and gradients are within the limits of the verdict."""
    data, inputs = subject.data(point)
    run = subject.run(point, inputs, data.do if grad else None, data)
    yield from faults(subject.slot, point.case, run, data)


def operator(subject: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """Run torch.library.opcheck, which includes the backward under aot_autograd.

    opcheck raises an error for a fault. The backward operator is not checked alone: opcheck would
    run it under a dispatch mode, and a backward may use torch.func.vjp, which fails in that mode.
    """
    data, inputs = subject.data(point)
    kernel, op = subject.kernel(point), slot_op(subject.entry.name, subject.slot, subject.spec)
    tail = (
        data.cu_seqlens,
        data.max_seqlen,
        kernel.scale,
        list(kernel.geometry),
        kernel.deterministic,
        None,  # first_query: whole sequences
    )
    leaves = [
        t.clone().requires_grad_(grad and n not in ("blocks", "lse")) for n, t in inputs.items()
    ]
    torch.library.opcheck(op.op, (*leaves, *tail))
    yield from ()


def compiled(subject: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """Judge results under torch.compile(fullgraph=True): aot_eager on the CPU, else inductor."""
    data, inputs = subject.data(point)
    kernel = subject.kernel(point)
    torch._dynamo.reset()
    backend = "aot_eager" if torch.device(subject.device).type == "cpu" else "inductor"
    run_compiled: Any = torch.compile(lambda *x: kernel(*x), backend=backend, fullgraph=True)
    leaves = [
        t.clone().requires_grad_(grad and n not in ("blocks", "lse")) for n, t in inputs.items()
    ]
    results = run_compiled(*leaves)
    results = (results,) if isinstance(results, torch.Tensor) else tuple(results)
    names = ("blocks",) if subject.slot == "select" else ("o", "lse")
    outputs = dict(zip(names, results))
    if grad:
        differentiated = {n: leaf for n, leaf in zip(inputs, leaves) if leaf.requires_grad}
        grads = torch.autograd.grad(results[0], list(differentiated.values()), data.do)
        outputs |= {f"d{n}": g for n, g in zip(differentiated, grads)}
    run = SlotRun(inputs, {n: t.detach() for n, t in outputs.items()}, data.do if grad else None)
    yield from faults(subject.slot, point.case, run, data)


def cuda_graph(subject: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """Check that a graph replayed on new inputs equals eager bit for bit (fault row 50)."""
    _, inputs = subject.data(point)
    kernel, static = subject.kernel(point), {n: t.clone() for n, t in inputs.items()}
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        kernel(*static.values())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = kernel(*static.values())
    _, fresh = subject.data(point, seed=7)
    for name, tensor in static.items():
        tensor.copy_(fresh[name])
    graph.replay()
    with torch.no_grad():
        eager = kernel(*fresh.values())
    for index, (actual, expected) in enumerate(zip(_tuple(captured), _tuple(eager))):
        if not torch.equal(bits(actual), bits(expected)):
            yield f"result {index} of the replayed graph differs from eager"


def strided(subject: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """Judge inputs with a strided last axis, gaps between rows, or unaligned pointers.

    The gradient of o also has stride 0 in its last axis.
    """
    data, inputs = subject.data(point)
    for label, relayout in (
        ("last axis strided", _transposed),
        ("rows apart", _apart),
        ("pointer off", _shifted),
    ):
        strided_ = {n: t if n in ("blocks", "lse") else relayout(t) for n, t in inputs.items()}
        run = subject.run(point, strided_, relayout(data.do) if grad else None, data)
        yield from (f"{label}: {fault}" for fault in faults(subject.slot, point.case, run, data))
    if grad:
        run = subject.run(point, inputs, data.do[..., :1].expand_as(data.do), data)
        yield from (
            f"dO of stride 0: {fault}" for fault in faults(subject.slot, point.case, run, data)
        )


def expanded(subject: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """Judge keys and values that are expanded over the batch with stride 0 (fault row 16)."""
    data, inputs = subject.data(point)
    expanded_ = {n: t[:1].expand_as(t) if n[0] in "kv" else t for n, t in inputs.items()}
    if subject.slot == "select":
        return  # its lse belongs to the original keys
    run = subject.run(point, expanded_, data.do if grad else None, data)
    yield from faults(subject.slot, point.case, run, data)


def long_offsets(subject: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """Judge inputs with batch entries more than 2^31 elements apart, in turn (fault row 43)."""
    data, inputs = subject.data(point)
    for name in [n for n in inputs if n not in ("blocks", "lse")]:
        run = subject.run(
            point, {**inputs, name: _far(inputs[name])}, data.do if grad else None, data
        )
        yield from (f"{name}: {fault}" for fault in faults(subject.slot, point.case, run, data))
        del run
        if torch.device(subject.device).type == "cuda":
            torch.cuda.empty_cache()


def two_threads(subject: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """Judge two threads that make their first call at the same time (fault row 52).

    Each thread has its own inputs, and on a GPU its own stream. A deterministic kernel gives a
    thread equal bits in every call.
    """
    problems = [subject.data(point, seed) for seed in (0, 1)]
    runs: list[list[SlotRun]] = [[], []]
    errors: list[Exception] = []
    barrier = threading.Barrier(2)
    if torch.device(subject.device).type == "cuda":
        torch.cuda.synchronize()  # another stream wrote the inputs

    def work(index: int) -> None:
        data, inputs = problems[index]
        try:
            barrier.wait(30)
            for _ in range(3):
                runs[index].append(
                    _run_on_stream(subject, point, inputs, data.do if grad else None, data)
                )
        except (NSAError, RuntimeError) as error:
            errors.append(error)  # any other error ends the thread before its last call

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield from (f"a thread ended with {error!r}" for error in errors)
    if not errors and any(len(calls) != 3 for calls in runs):
        yield "a thread did not finish its three calls"
    for (data, _), calls in zip(problems, runs):
        for run in calls:
            yield from faults(subject.slot, point.case, run, data)
            if subject.spec.deterministic:
                changed = [
                    n
                    for n, t in run.outputs.items()
                    if not torch.equal(bits(t), bits(calls[0].outputs[n]))
                ]
                yield from (
                    f"{name}: its bits differ from the first call of the thread" for name in changed
                )


def _run_on_stream(
    subject: SlotUnderTest,
    point: Point,
    inputs: Mapping[str, torch.Tensor],
    do: torch.Tensor | None,
    data: CaseData,
) -> SlotRun:
    if torch.device(subject.device).type != "cuda":
        return subject.run(point, inputs, do, data)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run = subject.run(point, inputs, do, data)
        stream.synchronize()
    return run


def grad_modes(subject: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """Check that gradients, no_grad and inference mode give equal forward bits (fault row 33)."""
    data, inputs = subject.data(point)
    kernel = subject.kernel(point)
    with_grad = subject.run(point, inputs, data.do if grad else None, data).outputs
    with torch.no_grad():
        no_grad = _tuple(kernel(*inputs.values()))
    with torch.inference_mode():
        inference = _tuple(kernel(*inputs.values()))
    for mode, results in (("no_grad", no_grad), ("inference_mode", inference)):
        for (name, expected), actual in zip(with_grad.items(), results):
            if subject.spec.deterministic and not torch.equal(bits(actual), bits(expected)):
                yield f"{name} under {mode} differs from {name} with gradients"


def _tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Copy with a strided last axis."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Copy with NaN between the rows."""
    storage = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), torch.nan)
    return storage[..., : tensor.shape[-1]].copy_(tensor)


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Copy with a pointer that is one element off alignment."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def _far(tensor: torch.Tensor) -> torch.Tensor:
    """Copy with batch entries that are FAR elements apart."""
    entry = tensor[0].contiguous()
    storage = torch.empty(
        FAR * (len(tensor) - 1) + entry.numel(), dtype=tensor.dtype, device=tensor.device
    )
    return storage.as_strided(tensor.shape, (FAR, *entry.stride())).copy_(tensor)
