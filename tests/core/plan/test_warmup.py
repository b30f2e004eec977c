"""plan.warmup() runs every slot once, forward and backward as planned, and keeps the RNG state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa_backend_sdpa.plugin import nsa_register_backends as sdpa
from nsa_core import InvalidInput, resolve
from nsa_core.contract import SLOTS, DecodeCall, Request
from nsa_core.errors import Unsupported
from nsa_core.plan.registry import Registry
from nsa_core.plan.warmup import warm
from nsa_core.torch_ops.backend_call import record_dispatch
from nsa_core.torch_ops.decode_kernel import DecodeKernel
from nsa_verify.problems.cases import config_of

CONFIG = config_of(4, 2, 8, 4, (8, 4, 16, 4, 24))


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["forward", "both"])
def test_warmup_runs_every_slot_once(varlen: bool, needs_grad: bool) -> None:
    plan = resolve(CONFIG, backends="sdpa", needs_grad=needs_grad, varlen=varlen)
    state = torch.get_rng_state()
    with record_dispatch() as trace:
        plan.warmup()
    expected = [
        (slot, direction)
        for slot in ("cmp", "select", "sel", "win", "win", "combine")  # the first win: causal sel
        for direction in ("forward", "backward")
        if needs_grad or direction == "forward"
    ]
    expected = [pair for pair in expected if pair != ("select", "backward")]
    assert [(r.slot, r.direction) for r in trace] == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_warmup_of_a_slot_that_needs_many_tokens_also_runs_few() -> None:
    plan = resolve(CONFIG, backends="sdpa")
    lengths: list[int] = []

    def sel(q: torch.Tensor, *tensors: torch.Tensor, **_: object) -> None:
        lengths.append(q.shape[1])

    slots = {**plan._slots, "sel": dataclasses.replace(plan._slots["sel"], warmup_tokens=200)}
    dataclasses.replace(plan, _slots=slots, sel=sel).warmup()
    assert lengths == [200, 16]


def test_warmup_of_a_fused_backward_runs_many_tokens_and_few() -> None:
    plan, lengths = resolve(CONFIG, backends="sdpa", needs_grad=True), []

    class Fused:
        def gradients(self, nonnegative: bool, tensors: list[torch.Tensor], tail: object) -> None:
            lengths.append(tensors[1].shape[1])

    slots = {**plan._slots, "sel": dataclasses.replace(plan._slots["sel"], warmup_tokens=200)}
    kernels, fused = {slot: getattr(plan, slot) for slot in SLOTS}, {"backward": Fused()}
    warm(kernels, fused, plan.requests, slots, CONFIG, torch.device("cpu"))
    assert lengths == [200, 16]


def test_warmup_on_another_device_type_raises() -> None:
    with pytest.raises(InvalidInput, match="the plan is for cpu, got cuda"):
        resolve(CONFIG, backends="sdpa").warmup("cuda")


@pytest.mark.parametrize("page", [None, 32])
def test_warmup_of_a_decode_plan_runs_its_decode_forms(page: int | None) -> None:
    plan = resolve(CONFIG, backends="sdpa", phase="decode", page_size=page)
    with record_dispatch() as trace:
        plan.warmup()
    expected = [(slot, "forward" if slot == "combine" else "decode") for slot in SLOTS]
    assert [(r.slot, r.direction) for r in trace] == expected


def test_warmup_of_quantized_pages_runs_both_kinds_of_scales() -> None:
    """Triton compiles another kernel if all pages have the same scales, as those of a cache."""
    plan = resolve(CONFIG, backends="sdpa", phase="decode", kv_dtype="int8")
    own_scales: list[tuple[str, list[bool]]] = []

    def recorded(slot: str) -> Callable[..., Any]:
        def run(*tensors: torch.Tensor, **options: Any) -> Any:
            if slot != "combine":
                own_scales.append((slot, [x.stride(0) > 0 for x in options["call"].scales]))
            return getattr(plan, slot)(*tensors, **options)

        return run

    kernels = {slot: recorded(slot) for slot in SLOTS}
    warm(kernels, {}, plan.requests, plan._slots, CONFIG, torch.device("cpu"))
    forms = [slot for slot in SLOTS if slot != "combine"]
    assert own_scales == [(slot, [own] * 3) for own in (False, True) for slot in forms]


def test_warmup_of_a_decode_plan_runs_its_fused_forms() -> None:
    calls: list[tuple[str, bool]] = []

    def step(
        q: torch.Tensor, gates: torch.Tensor, *stores: torch.Tensor, call: DecodeCall
    ) -> object:
        calls.append(("step", len(stores) == 6))
        return q.new_zeros(*q.shape[:-1], 4), torch.zeros(*q.shape[:2], 2, 4, dtype=torch.int32)

    def gates(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, call: DecodeCall
    ) -> torch.Tensor:
        calls.append(("gates", weight.shape == (len(bias), x.shape[-1])))
        return x.new_zeros(*x.shape[:2], len(bias) // 3, 3)

    def append(
        q: torch.Tensor, k: object, v: object, *stores: object, rope: object, **_: object
    ) -> torch.Tensor:
        calls.append(("append", rope is None))
        return q

    def compress(
        k: torch.Tensor, v: torch.Tensor, *rest: object, rope: object, call: DecodeCall
    ) -> None:
        assert [len(weights) for weights in rest[2:]] == [5, 5]
        calls.append(("compress", rope is None))

    plan, functions = (
        resolve(CONFIG, backends="sdpa", phase="decode"),
        {"step": step, "append": append, "gates": gates, "compress": compress},
    )
    forms = {name: DecodeKernel("toy", name, f) for name, f in functions.items()}
    dataclasses.replace(plan, fused=forms).warmup()
    expected = [("step", True), ("append", True), ("append", False), ("gates", True)]
    assert calls == [*expected, ("compress", False)]


def test_workspace_of_a_decode_form_uses_decode_workspace_only() -> None:
    plan = resolve(CONFIG, backends="sdpa", phase="decode")
    request = dataclasses.replace(plan.requests["win"], batch=1, seq_len=64)
    with pytest.raises(
        Unsupported, match="backend 'sdpa' does not state the workspace of the decode form of 'win'"
    ):
        plan.workspace_bytes(request)
    slots = {
        s: dataclasses.replace(x, decode_workspace=f"{__name__}:workspace")
        for s, x in sdpa().slots.items()
    }
    registry = Registry(()).with_backend(dataclasses.replace(sdpa(), name="stated", slots=slots))
    assert resolve(CONFIG, phase="decode", registry=registry).workspace_bytes(request) == 64


def workspace(request: Request) -> int:
    return request.seq_len or 0
