"""What a kernel must survive besides being right: compilers, graphs, layouts, long offsets,
threads.

Each check takes a slot under test, a point of the grid and whether to ask for gradients, and yields
a line per fault.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nsa_core.errors import NSAError
from nsa_core.torch_ops.slot_op import slot_op
from nsa_verify.cases import CaseData
from nsa_verify.conformance.grid import Point
from nsa_verify.conformance.slot_under_test import SlotUnderTest, faults
from nsa_verify.findings import bits
from nsa_verify.slot_runs import SlotRun

Check = Callable[[SlotUnderTest, Point, bool], Iterator[str]]
FAR = 2**31 + 128  # elements between two batch entries: past what a 32-bit offset reaches


def right(slot: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """Outputs, LSE and gradients are within the verdict's limits."""
    data, inputs = slot.data(point)
    run = slot.run(point, inputs, data.do if grad else None, data)
    yield from faults(slot.slot, point.case, run, data)


def operator(slot: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """torch.library.opcheck passes, and with it the backward under aot_autograd; it raises what it
    finds.

    The backward operator is not checked alone: opcheck runs it under a dispatch mode, which the
    torch.func.vjp that a backward may use does not survive.
    """
    data, inputs = slot.data(point)
    kernel, op = slot.kernel(point), slot_op(slot.entry.name, slot.slot, slot.spec)
    tail = (
        data.cu_seqlens,
        data.max_seqlen,
        kernel.scale,
        list(kernel.geometry),
        kernel.deterministic,
    )
    asked = [
        t.clone().requires_grad_(grad and n not in ("blocks", "lse")) for n, t in inputs.items()
    ]
    torch.library.opcheck(op.op, (*asked, *tail))
    yield from ()


def compiled(slot: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """torch.compile(fullgraph=True) gives what eager gives: aot_eager on the CPU, inductor on a
    GPU.
    """
    data, inputs = slot.data(point)
    kernel = slot.kernel(point)
    torch._dynamo.reset()
    backend = "aot_eager" if torch.device(slot.device).type == "cpu" else "inductor"
    whole: Any = torch.compile(lambda *x: kernel(*x), backend=backend, fullgraph=True)
    leaves = [
        t.clone().requires_grad_(grad and n not in ("blocks", "lse")) for n, t in inputs.items()
    ]
    results = whole(*leaves)
    results = (results,) if isinstance(results, torch.Tensor) else tuple(results)
    names = ("blocks",) if slot.slot == "select" else ("o", "lse")
    outputs = dict(zip(names, results))
    if grad:
        asked = {n: leaf for n, leaf in zip(inputs, leaves) if leaf.requires_grad}
        grads = torch.autograd.grad(results[0], list(asked.values()), data.do)
        outputs |= {f"d{n}": g for n, g in zip(asked, grads)}
    run = SlotRun(inputs, {n: t.detach() for n, t in outputs.items()}, data.do if grad else None)
    yield from faults(slot.slot, point.case, run, data)


def cuda_graph(slot: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """A captured graph, replayed on new inputs, gives eager's bits (fault row 50)."""
    _, inputs = slot.data(point)
    kernel, static = slot.kernel(point), {n: t.clone() for n, t in inputs.items()}
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        kernel(*static.values())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = kernel(*static.values())
    _, fresh = slot.data(point, seed=7)
    for name, tensor in static.items():
        tensor.copy_(fresh[name])
    graph.replay()
    with torch.no_grad():
        eager = kernel(*fresh.values())
    for index, (got, want) in enumerate(zip(_tuple(captured), _tuple(eager))):
        if not torch.equal(bits(got), bits(want)):
            yield f"result {index} of the replayed graph differs from eager"


def strided(slot: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """Inputs whose last axis is not contiguous, rows that lie apart, one pointer off, and dO of
    stride 0.
    """
    data, inputs = slot.data(point)
    for label, change in (
        ("last axis strided", _transposed),
        ("rows apart", _apart),
        ("pointer off", _shifted),
    ):
        moved = {n: t if n in ("blocks", "lse") else change(t) for n, t in inputs.items()}
        run = slot.run(point, moved, change(data.do) if grad else None, data)
        yield from (f"{label}: {fault}" for fault in faults(slot.slot, point.case, run, data))
    if grad:
        run = slot.run(point, inputs, data.do[..., :1].expand_as(data.do), data)
        yield from (
            f"dO of stride 0: {fault}" for fault in faults(slot.slot, point.case, run, data)
        )


def expanded(slot: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """Keys and values expanded over the batch with stride 0 are as good as copies (fault row
    16).
    """
    data, inputs = slot.data(point)
    moved = {n: t[:1].expand_as(t) if n[0] in "kv" else t for n, t in inputs.items()}
    if slot.slot == "select":
        return  # its lse would belong to other keys
    run = slot.run(point, moved, data.do if grad else None, data)
    yield from faults(slot.slot, point.case, run, data)


def long_offsets(slot: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """Batch entry 1 starts more than 2^31 elements after entry 0, each input in turn (fault row
    43).
    """
    data, inputs = slot.data(point)
    for name in [n for n in inputs if n not in ("blocks", "lse")]:
        run = slot.run(point, {**inputs, name: _far(inputs[name])}, data.do if grad else None, data)
        yield from (f"{name}: {fault}" for fault in faults(slot.slot, point.case, run, data))
        del run
        if torch.device(slot.device).type == "cuda":
            torch.cuda.empty_cache()


def two_threads(slot: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """Two threads with inputs of their own, on a GPU each on its own stream, call first together
    (fault row 52).

    Both are right, and a deterministic kernel gives each thread the same bits every time.
    """
    given = [slot.data(point, seed) for seed in (0, 1)]
    runs: list[list[SlotRun]] = [[], []]
    errors: list[Exception] = []
    barrier = threading.Barrier(2)
    if torch.device(slot.device).type == "cuda":
        torch.cuda.synchronize()  # the inputs were made on another stream than will read them

    def work(which: int) -> None:
        data, inputs = given[which]
        try:
            barrier.wait(30)
            for _ in range(3):
                runs[which].append(
                    _on_a_stream(slot, point, inputs, data.do if grad else None, data)
                )
        except (
            NSAError,
            RuntimeError,
        ) as error:  # anything else ends the thread, and leaves runs out
            errors.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield from (f"a thread ended with {error!r}" for error in errors)
    if not errors and any(len(mine) != 3 for mine in runs):
        yield "a thread did not finish its three calls"
    for (data, _), mine in zip(given, runs):
        for run in mine:
            yield from faults(slot.slot, point.case, run, data)
            if slot.spec.deterministic:
                changed = [
                    n
                    for n, t in run.outputs.items()
                    if not torch.equal(bits(t), bits(mine[0].outputs[n]))
                ]
                yield from (
                    f"{name} has other bits than at the thread's first call" for name in changed
                )


def _on_a_stream(
    slot: SlotUnderTest,
    point: Point,
    inputs: Mapping[str, torch.Tensor],
    do: torch.Tensor | None,
    data: CaseData,
) -> SlotRun:
    if torch.device(slot.device).type != "cuda":
        return slot.run(point, inputs, do, data)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run = slot.run(point, inputs, do, data)
        stream.synchronize()
    return run


def grad_modes(slot: SlotUnderTest, point: Point, grad: bool) -> Iterator[str]:
    """With gradients asked for, under no_grad and in inference mode: the same forward bits (fault
    row 33).
    """
    data, inputs = slot.data(point)
    kernel = slot.kernel(point)
    given = slot.run(point, inputs, data.do if grad else None, data).outputs
    with torch.no_grad():
        without = _tuple(kernel(*inputs.values()))
    with torch.inference_mode():
        inference = _tuple(kernel(*inputs.values()))
    for mode, results in (("no_grad", without), ("inference_mode", inference)):
        for (name, want), got in zip(given.items(), results):
            if slot.spec.deterministic and not torch.equal(bits(got), bits(want)):
                yield f"{name} under {mode} differs from {name} with gradients"


def _tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), torch.nan)
    return storage[..., : tensor.shape[-1]].copy_(tensor)


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def _far(tensor: torch.Tensor) -> torch.Tensor:
    one = tensor[0].contiguous()
    storage = torch.empty(
        FAR * (len(tensor) - 1) + one.numel(), dtype=tensor.dtype, device=tensor.device
    )
    return storage.as_strided(tensor.shape, (FAR, *one.stride())).copy_(tensor)
