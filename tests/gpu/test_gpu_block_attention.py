"""block_attention and block_attention_decode on a GPU: CUDA graphs, and no synchronisation.

A captured call may have metadata of any strides: its replays read the new values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa_core import (
    block_attention,
    block_attention_decode,
    block_attention_decode_with_lse,
    block_attention_with_lse,
    plan_block_attention,
)
from nsa_core.block.plans import BlockPlan
from nsa_verify.problems.findings import bits

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

DEVICE, DTYPE = "cuda", torch.bfloat16
HEADS, GROUPS, WIDTH, V_WIDTH = 8, 2, 64, 32
SIZE, BLOCKS, TOKENS, PAGE = 64, 5, 2000, 64
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
STRIDED = pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])

Inputs = dict[str, torch.Tensor]


def plan_of(**options: Any) -> BlockPlan:
    """Return a plan on the triton backend."""
    return plan_block_attention(
        HEADS,
        GROUPS,
        WIDTH,
        v_head_dim=V_WIDTH,
        block_size=SIZE,
        n_blocks=BLOCKS,
        device=DEVICE,
        dtype=DTYPE,
        backends="triton",
        **options,
    )


def training_inputs(packed: bool, seed: int) -> Inputs:
    """Return q, k, v, the gradient of o, and random blocks; some of them do not exist."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    rows = (TOKENS,) if packed else (2, TOKENS)
    shapes = {"q": (HEADS, WIDTH), "k": (GROUPS, WIDTH), "v": (GROUPS, V_WIDTH)}
    shapes["do"] = (HEADS, V_WIDTH)
    x = {
        name: torch.randn(*rows, *shape, device=DEVICE, dtype=DTYPE, generator=generator)
        for name, shape in shapes.items()
    }
    for name in ("q", "k", "v"):
        x[name].requires_grad_()
    x["blocks"] = torch.randint(
        -1, TOKENS // SIZE + 2, (*rows, GROUPS, BLOCKS), device=DEVICE, generator=generator
    )
    if packed:
        lengths = [0, 700 + 10 * seed, 0, TOKENS - 700 - 10 * seed]
        bounds = torch.tensor(lengths).cumsum(0).to(torch.int32)
        x["cu_seqlens"] = bounds.to(DEVICE)
    return x


def train(x: Inputs, plan: BlockPlan) -> list[torch.Tensor]:
    """Return the output, the log-sum-exp and the gradients of q, k and v."""
    o, lse = block_attention_with_lse(
        x["q"],
        x["k"],
        x["v"],
        x["blocks"],
        block_size=SIZE,
        cu_seqlens=x.get("cu_seqlens"),
        max_seqlen=TOKENS if "cu_seqlens" in x else None,
        plan=plan,
    )
    gradients = torch.autograd.grad(o, [x["q"], x["k"], x["v"]], x["do"])
    return [o.detach(), lse, *gradients]


def decode_inputs(paged: bool, seed: int) -> Inputs:
    """Return two new tokens of three sequences over a cache of up to 300 tokens."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    pages = 5  # of a sequence
    cache = (3 * pages, PAGE) if paged else (3, pages * PAGE)
    shapes = {
        "q": (3, 2, HEADS, WIDTH),
        "k": (*cache, GROUPS, WIDTH),
        "v": (*cache, GROUPS, V_WIDTH),
    }
    x = {
        name: torch.randn(*shape, device=DEVICE, dtype=DTYPE, generator=generator)
        for name, shape in shapes.items()
    }
    x["blocks"] = torch.randint(
        -1, pages + 1, (3, 2, GROUPS, BLOCKS), device=DEVICE, generator=generator
    )
    x["lengths"] = torch.randint(2, 301, (3,), device=DEVICE, generator=generator).int()
    if paged:
        table = torch.randperm(3 * pages, device=DEVICE, generator=generator)
        x["block_table"] = table.int().view(3, pages)
        x["starts"] = x["lengths"] - 1  # the second row is padding
    return x


def decode(x: Inputs, plan: BlockPlan) -> list[torch.Tensor]:
    """Return the output and the log-sum-exp."""
    return list(block_attention_decode_with_lse(**x, block_size=SIZE, plan=plan))


def with_gaps(x: torch.Tensor) -> torch.Tensor:
    """Return integers as a column of a table, whose other column holds 7; others as they are."""
    if x.is_floating_point():
        return x
    return torch.stack([x, torch.full_like(x, 7)], -1)[..., 0]


def assert_a_replay_equals_eager(
    run: Callable[[Inputs], list[torch.Tensor]], inputs: Callable[[int], Inputs], strided: bool
) -> None:
    """Capture one call; replay it with other values in the same tensors.

    Args:
        run: The call.
        inputs: Returns its tensors for a seed.
        strided: Whether the metadata of the captured call has gaps; that of eager calls has none.
    """
    static = inputs(0)
    if strided:
        static = {name: with_gaps(x) for name, x in static.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(static)  # compiles the kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(static)
    for seed in (1, 2):
        new = inputs(seed)
        with torch.no_grad():
            for name, tensor in static.items():
                tensor.copy_(new[name])
            for output in captured:
                output.fill_(torch.nan)
        graph.replay()
        for actual, expected in zip(captured, run(new), strict=True):
            assert torch.equal(bits(actual), bits(expected)), seed


def assert_no_synchronisation(run: Callable[[], Any]) -> None:
    """Run once to compile, then with an error at each synchronisation."""
    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@STRIDED
@PACKED
def test_a_graph_of_forward_and_backward_equals_eager(packed: bool, strided: bool) -> None:
    plan = plan_of(needs_grad=True, varlen=packed, deterministic=True)
    assert_a_replay_equals_eager(
        lambda x: train(x, plan), lambda seed: training_inputs(packed, seed), strided
    )


@pytest.mark.parametrize("deterministic", [False, True], ids=["fastest", "deterministic"])
@PACKED
def test_forward_and_backward_do_not_synchronise(packed: bool, deterministic: bool) -> None:
    plan = plan_of(needs_grad=True, varlen=packed, deterministic=deterministic)
    x = training_inputs(packed, 0)
    assert_no_synchronisation(lambda: train(x, plan))


@STRIDED
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_a_graph_of_a_decoding_step_equals_eager(paged: bool, strided: bool) -> None:
    plan = plan_of(phase="decode", page_size=PAGE if paged else None)
    assert_a_replay_equals_eager(
        lambda x: decode(x, plan), lambda seed: decode_inputs(paged, seed), strided
    )


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_a_decoding_step_does_not_synchronise(paged: bool) -> None:
    plan = plan_of(phase="decode", page_size=PAGE if paged else None)
    x = decode_inputs(paged, 0)
    assert_no_synchronisation(lambda: decode(x, plan))


def test_calls_without_a_plan_do_not_synchronise() -> None:
    """A plan is resolved once per shape and cached."""
    x, step = training_inputs(False, 0), decode_inputs(True, 0)
    options = {"block_size": SIZE, "backends": "triton"}
    assert_no_synchronisation(
        lambda: block_attention(x["q"], x["k"], x["v"], x["blocks"], **options)
    )
    assert_no_synchronisation(lambda: block_attention_decode(**step, **options))
