"""Queries that begin inside a sequence: checks, planning, autograd, vmap and torch.compile."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import partial_toy
from nsa_core import InvalidInput, Unsupported, resolve
from nsa_core.contract import Request
from nsa_core.plan.candidates import request_of
from nsa_core.plan.registry import Registry, default_registry
from nsa_core.torch_ops.kernel import Kernel
from nsa_core.torch_ops.slot_op import slot_op
from nsa_verify.problems.cases import config_of

CONFIG = config_of(4, 2, 8, 8, (4, 2, 8, 3, 6))
SPEC = partial_toy.spec()


def kernel(slot: str = "win", partial: bool = True) -> Kernel:
    """Return the toy's win, or the operator of another slot of sdpa for its checks."""
    backend = SPEC if slot == "win" else default_registry().get("sdpa").spec
    op = slot_op(backend.name, slot, backend.slots[slot]).op
    return Kernel(backend.name, slot, op, 0.3, tuple(CONFIG.geometry.as_ints()), False, partial)


def tensors(*lead: int) -> list[torch.Tensor]:
    """Return q, k and v [*lead, H, D] of whole sequences."""
    r = torch.Generator().manual_seed(0)
    return [torch.randn(*lead, h, 8, generator=r, dtype=torch.float64) for h in (4, 2, 2)]


@pytest.mark.parametrize("packed", [False, True])
def test_cut_call_gives_the_rows_of_the_whole_call(packed: bool) -> None:
    bounds = torch.tensor([0, 9, 9, 30], dtype=torch.int32) if packed else None
    whole = tensors(30) if packed else tensors(2, 30)
    axis = whole[0].dim() - 3
    leaves = [x.clone().requires_grad_() for x in whole]
    o, lse = kernel(partial=False)(*leaves, cu_seqlens=bounds)
    do = torch.randn_like(o)
    grads = torch.autograd.grad(o, leaves, do)
    total = [torch.zeros_like(x) for x in grads]
    for first, last in ((0, 7), (7, 8), (8, 21), (21, 30)):
        cut = [leaves[0].narrow(axis, first, last - first), *leaves[1:]]
        part_o, part_lse = kernel()(*cut, cu_seqlens=bounds, max_seqlen=30, first_query=first)
        torch.testing.assert_close(part_o, o.narrow(axis, first, last - first))
        torch.testing.assert_close(part_lse, lse[..., first:last])
        part = torch.autograd.grad(part_o, leaves, do.narrow(axis, first, last - first))
        total = [a + b for a, b in zip(total, part)]
    for a, b in zip(total, grads):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("slot", "rows", "keys", "values", "first_query", "message"),
    [
        (
            "win",
            5,
            9,
            9,
            5,
            "k and v have 9 rows, but the 5 rows of q from first_query = 5 on need at least 10",
        ),
        ("win", 5, 9, 9, -1, "first_query must be >= 0, got -1"),
        (
            "cmp",
            5,
            3,
            3,
            5,
            "k_cmp and v_cmp have 3 compressed tokens, but the 5 rows of q from first_query = 5 on",
        ),
        ("win", 5, 9, 9, None, "q has 5 tokens, but k and v have 9 tokens"),
        # Both have more rows than the queries need, but a kernel reads as many of both.
        ("win", 5, 12, 11, 5, "v has 11 rows, but k has 12"),
        ("cmp", 5, 12, 11, 5, "v_cmp has 11 compressed"),
    ],
)
def test_key_rows_that_do_not_fit_are_refused(
    slot: str, rows: int, keys: int, values: int, first_query: int | None, message: str
) -> None:
    q, k, v = tensors(1, rows)[0], tensors(1, keys)[1], tensors(1, values)[2]
    with pytest.raises(InvalidInput, match=message):
        kernel(slot)(q, k, v, first_query=first_query)


def test_first_query_needs_a_partial_plan() -> None:
    plan = resolve(CONFIG, dtype="float64", backends="sdpa")
    with pytest.raises(InvalidInput, match=r"first_query is 3.*resolve it with partial=True"):
        plan.win(*tensors(1, 9), first_query=3)


@pytest.mark.parametrize(
    ("slot", "keys", "last", "message"),
    [
        ("win", 20, 19, "must end at the 20 tokens given, got 19"),
        ("cmp", 10, 16, "must end at the 20 to 21 tokens given, got 16"),
        ("cmp", 8, 18, "must end at the 17 to 17 tokens given, got 18"),
    ],
)
def test_bounds_of_a_cut_packed_call_fit_the_keys(
    slot: str, keys: int, last: int, message: str
) -> None:
    q, k = tensors(7)[0], tensors(keys)[1]
    bounds = torch.tensor([0, 5, last], dtype=torch.int32)
    with pytest.raises(InvalidInput, match=message):
        kernel(slot)(q, k, k, cu_seqlens=bounds, max_seqlen=20, first_query=10)


@pytest.mark.parametrize("version", [(1, 0), (1, 1)])
def test_backend_that_does_not_declare_partial_is_not_asked(version: tuple[int, int]) -> None:
    sdpa = default_registry().get("sdpa").spec
    slots = {n: dataclasses.replace(s, partial=True) for n, s in sdpa.slots.items()}
    registry = Registry(()).with_backend(dataclasses.replace(sdpa, slots=slots))
    registry = registry.with_backend(partial_toy.spec(version, partial=False))
    assert resolve(CONFIG, registry=registry).choices["win"].backend == "partial-toy"
    partial_toy.asked.clear()
    plan = resolve(CONFIG, registry=registry, partial=True)
    assert plan.choices["win"].backend == "sdpa"
    assert "does not take queries that begin inside a sequence in win" in plan.explain()
    assert "queries inside a sequence" in plan.explain().splitlines()[0]
    assert partial_toy.asked == []
    with pytest.raises(Unsupported, match="pass whole sequences, or use another backend"):
        resolve(CONFIG, registry=registry, partial=True, backends={"win": "partial-toy"})


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("version", [(1, 0), (1, 1)])
def test_backend_that_does_not_declare_partial_runs_forward_and_backward(
    version: tuple[int, int], packed: bool
) -> None:
    bounds = torch.tensor([0, 9, 30], dtype=torch.int32) if packed else None
    bounded = {"cu_seqlens": bounds, "max_seqlen": 21} if packed else {}
    leaves = [x.requires_grad_() for x in (tensors(30) if packed else tensors(2, 30))]
    sdpa = default_registry().get("sdpa").spec
    toy = partial_toy.spec(version, partial=False)
    registry = Registry(()).with_backend(sdpa).with_backend(toy)
    options = {"dtype": "float64", "needs_grad": True, "varlen": packed, "registry": registry}
    plan, expected = (
        resolve(CONFIG, backends={"win": name}, **options) for name in (toy.name, "sdpa")
    )
    assert [p.choices["win"].backend for p in (plan, expected)] == ["partial-toy", "sdpa"]
    (o, lse), (expected_o, expected_lse) = (p.win(*leaves, **bounded) for p in (plan, expected))
    torch.testing.assert_close((o, lse), (expected_o, expected_lse))
    do = torch.randn_like(o)
    grads, expected_grads = (torch.autograd.grad(x, leaves, do) for x in (o, expected_o))
    torch.testing.assert_close(grads, expected_grads)


def test_decode_request_cannot_be_partial() -> None:
    with pytest.raises(InvalidInput, match="partial must be False, got False, False and True"):
        request_of(CONFIG, "win", phase="decode", partial=True)
    with pytest.raises(InvalidInput, match="partial must be True or False, got 1"):
        Request(**{**vars(request_of(CONFIG, "win")), "partial": 1})


def test_vmap_maps_over_cut_calls() -> None:
    whole = tensors(3, 2, 12)
    q = whole[0][:, :, 5:9]
    mapped = torch.func.vmap(lambda *x: kernel()(*x, first_query=5)[0])(q, *whole[1:])
    for i in range(3):
        torch.testing.assert_close(
            mapped[i], kernel()(q[i], whole[1][i], whole[2][i], first_query=5)[0]
        )


def test_compiled_call_with_a_changing_first_query_compiles_twice_at_most() -> None:
    whole, win, compilations = tensors(1, 64), kernel(), []

    def backend(graph, example):
        compilations.append(graph)
        return graph

    torch._dynamo.reset()
    run = torch.compile(
        lambda q, k, v, first: win(q, k, v, first_query=first)[0],
        backend=backend,
        fullgraph=True,
    )
    for first in (3, 17, 30, 44):
        q = whole[0][:, first : first + 8]
        torch.testing.assert_close(
            run(q, *whole[1:], first), win(q, *whole[1:], first_query=first)[0]
        )
    assert len(compilations) <= 2
