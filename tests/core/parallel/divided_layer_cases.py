"""Cases that run on every rank: layers with recompute=True, and layers with biases."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_core import NSAttention
from nsa_core.parallel import HeadParallel, Shards, whole_parameters
from nsa_core.torch_ops.backend_call import record_dispatch
from parallel_cases import Collectives, Problem, divided, problem, relative_error


class Storages(TorchDispatchMode):
    """Remember the storages that operators allocate, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self._sizes[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
        return result

    def alive(self) -> int:
        """Return the number of bytes that are still allocated."""
        return sum(size for storage, size in self._sizes.items() if not storage.expired())


def recomputed(rank: int, world: int, *, form: str, layout: str, check: bool) -> dict[str, Any]:
    """Compare a layer in mode sequence with and without recompute.

    Returns:
        equal: whether y, dx and the gradients of the parameters have the same bits.
        saved: bytes that the forward keeps, without recompute minus with it.
        again: calls of slots that the backward adds.
        collectives: those of forward and backward, without and with recompute.
    """
    case = problem(form)
    rows = case.x.shape[-2]
    shards = Shards(rows, world, rank, layout)
    results, kept, calls, collectives = [], [], [], []
    for recompute in (False, True):
        layer = divided(world, case.layer(), mode="sequence", layout=layout)
        layer.recompute, layer.check = recompute, check
        x = shards.take(case.x, -2).clone().requires_grad_()
        with record_dispatch() as trace, Collectives() as seen:
            with Storages() as storages:
                y = layer(x, case.cu_seqlens)
            kept.append(storages.alive())
            (y * shards.take(case.up, -2)).sum().backward()
        grads = [p.grad for p in layer.parameters()]
        results.append([y.detach(), x.grad, *grads])
        calls.append(collections.Counter((call.slot, call.direction) for call in trace))
        collectives.append(dict(seen.counts))
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(*results, strict=True)),
        "saved": kept[0] - kept[1],
        "again": dict(calls[1] - calls[0]),
        "collectives": collectives,
    }


def layer_with_biases(case: Problem, names: list[str]) -> NSAttention:
    """Return the layer of a problem with random biases in some linear layers."""
    layer = case.layer()
    torch.manual_seed(3)
    for name, linear in layer.named_modules():
        if name in names:
            width = linear.out_features
            linear.bias = torch.nn.Parameter(torch.randn(width, dtype=case.x.dtype))
    return layer


def biased_heads(
    rank: int, world: int, *, form: str, names: list[str], frozen: bool = False, **options: Any
) -> dict[str, Any]:
    """Return the errors of a layer with biases whose heads are divided.

    Args:
        form: name of the documents.
        names: the linear layers with a bias.
        frozen: whether the bias of out needs no gradient.
        options: fields of the config.
    """
    case = problem(form, **options)
    one, layer, gradients = (layer_with_biases(case, names) for _ in range(3))
    original = {name: p.detach().clone() for name, p in one.named_parameters()}
    mesh = init_device_mesh("cpu", (world,))
    for each in (layer, gradients):
        parallelize_module(each, mesh, HeadParallel())
    whole = whole_parameters(layer)
    results = []
    for each in (one, layer):
        if frozen:
            each.out.bias.requires_grad_(False)
        x = case.x.clone().requires_grad_()
        y = each(x, case.cu_seqlens)
        (y * case.up).sum().backward()
        results.append((y, x.grad))
    with torch.no_grad():
        for (_, target), (_, parameter) in zip(
            gradients.named_parameters(), layer.named_parameters(), strict=True
        ):
            target.copy_(torch.zeros_like(target) if parameter.grad is None else parameter.grad)
    actual = whole_parameters(gradients)
    expected = {n: p.grad for n, p in one.named_parameters() if p.grad is not None}
    least = 0.01 * max(float(grad.abs().max()) for grad in expected.values())
    return {
        "y": relative_error(results[1][0], results[0][0].detach()),
        "dx": relative_error(results[1][1], results[0][1]),
        "gradients": max(relative_error(actual[n], expected[n], least) for n in expected),
        "biases": sorted(name for name in expected if name in {f"{n}.bias" for n in names}),
        "frozen": not frozen or layer.out.bias.grad is None,
        "whole": whole.keys() == original.keys()
        and all(torch.equal(whole[name], original[name]) for name in original),
    }
