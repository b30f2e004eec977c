"""block_attention: attention to given blocks, judged by the oracle and by a dense mask."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from nsa_core import (
    InvalidInput,
    NSAConfig,
    Unsupported,
    block_attention,
    nsa_attention,
    plan_block_attention,
    resolve,
)
from nsa_core.layout import BlockGeometry
from nsa_verify.judge.slot import judge_slot

SIZE = 16


def geometry(size: int, n: int) -> BlockGeometry:
    return BlockGeometry(size, size, size, n, 0, 0, 1)


def problem(
    lead: tuple[int, ...] = (2, 150),
    rows: int | None = None,
    dtype: torch.dtype = torch.float32,
    n: int = 5,
    count: int = 14,
) -> dict[str, torch.Tensor]:
    """Return q, k, v and blocks: duplicates, -1, future and far blocks among them."""
    torch.manual_seed(0)
    keys = (*lead[:-1], rows or lead[-1])
    x = {
        "q": torch.randn(*lead, 6, 24, dtype=dtype),
        "k": torch.randn(*keys, 2, 24, dtype=dtype),
        "v": torch.randn(*keys, 2, 8, dtype=dtype),
    }
    blocks = torch.randint(-1, count, (*lead, 2, n))
    blocks[..., :1][torch.rand(*lead, 2, 1) < 0.1] = 2**40
    return {**{name: t.requires_grad_() for name, t in x.items()}, "blocks": blocks}


def masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, size: int
) -> torch.Tensor:
    """Return the output of dense attention with the mask of the blocks, in float64."""
    t, s = torch.arange(q.shape[1]), torch.arange(k.shape[1])
    seen = (blocks[..., None] == s // size).any(-2) & (s <= t[:, None])[:, None]  # [B, S, G, N]
    h = q.shape[2] // k.shape[2]
    seen = seen.repeat_interleave(h, 2).transpose(1, 2)
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(h, 1), v.repeat_interleave(h, 1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["dense", "packed", "inside", "packed inside"])
def test_output_and_gradients_match_the_oracle(case: str, dtype: torch.dtype) -> None:
    packed, inside = "packed" in case, "inside" in case
    x = problem((150,) if packed else (2, 90 if inside else 150), 150, dtype)
    options: dict[str, Any] = {}
    first = None
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 37, 37, 120, 150], dtype=torch.int32)
    if inside:
        first = 45
        options["first_query"] = first
        if packed:
            x["q"], x["blocks"] = (x[name][45:130].detach() for name in ("q", "blocks"))
            x["q"].requires_grad_()
    o, lse = block_attention(**x, block_size=SIZE, return_lse=True, **options)
    assert not lse.requires_grad
    do = torch.randn_like(o)
    grads = torch.autograd.grad(o, [x["q"], x["k"], x["v"]], do)
    outputs = {"o": o, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads))}
    verdicts = judge_slot(
        "sel",
        {name: t.detach() for name, t in x.items()},
        {name: t.detach() for name, t in outputs.items()},
        geometry(SIZE, x["blocks"].shape[-1]),
        24**-0.5,
        do=do,
        cu_seqlens=options.get("cu_seqlens"),
        first_query=first,
    )
    assert all(verdicts.values()), verdicts


@pytest.mark.parametrize("size", [5, 16, 128, 256, 384])
def test_blocks_of_any_size_match_a_dense_mask(size: int) -> None:
    """Blocks above 128 keys are split."""
    x = problem((1, 1600), n=3, count=1600 // size + 2)
    o = block_attention(**x, block_size=size)
    expected = masked(**x, size=size)
    assert float((o - expected).detach().abs().max()) < 1e-5
    o.sum().backward()
    found = [x[name].grad for name in ("q", "k", "v")]
    wanted = torch.autograd.grad(expected.sum(), [x["q"], x["k"], x["v"]])
    for a, b in zip(found, wanted, strict=True):
        assert a is not None
        assert float((a - b).abs().max()) < 1e-4


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8])
def test_blocks_may_have_any_integer_dtype(dtype: torch.dtype) -> None:
    x = problem()
    blocks = x["blocks"].clamp(0, 100)
    expected = block_attention(**{**x, "blocks": blocks}, block_size=SIZE)
    assert torch.equal(
        block_attention(**{**x, "blocks": blocks.to(dtype)}, block_size=SIZE), expected
    )


def test_a_query_without_blocks_gives_zero() -> None:
    x = problem()
    x["blocks"] = torch.full_like(x["blocks"], -1)
    o, lse = block_attention(**x, block_size=SIZE, return_lse=True)
    assert not o.any()
    assert (lse == -torch.inf).all()
    empty = block_attention(**{**x, "blocks": x["blocks"][..., :0]}, block_size=SIZE)
    assert torch.equal(empty, o)


def test_it_is_the_selected_branch_of_nsa() -> None:
    x = problem()
    gates = torch.zeros(2, 150, 6, 3)
    gates[..., 1] = 1
    config = NSAConfig(
        144, 6, 2, 24, 8, compress_block_size=8, compress_stride=4, select_block_size=SIZE,
        num_selected_blocks=5,
    )  # fmt: skip
    o = nsa_attention(x["q"], x["k"], x["v"], gates, config=config, blocks=x["blocks"])
    assert torch.equal(block_attention(**x, block_size=SIZE), o)


def test_a_scale_is_used() -> None:
    x = problem()
    scaled = block_attention(**{**x, "q": x["q"] * 0.5}, block_size=SIZE, scale=24**-0.5)
    assert torch.allclose(
        block_attention(**x, block_size=SIZE, scale=0.5 * 24**-0.5), scaled, atol=1e-6
    )


def test_a_plan_names_its_backend_and_serves_its_calls() -> None:
    plan = plan_block_attention(
        6, 2, 24, v_head_dim=8, block_size=512, n_blocks=5, device="cpu", needs_grad=True
    )
    assert plan.request.geometry.select_block_size == 128
    assert plan.explain().splitlines()[1].startswith("sel: sdpa ")
    assert "cmp" not in plan.explain().replace("compress", "")
    x = problem()
    expected = block_attention(**x, block_size=512)
    assert torch.equal(block_attention(**x, block_size=512, plan=plan), expected)
    with pytest.raises(InvalidInput, match="plan is for 128 keys a block, the call has 64"):
        block_attention(**x, block_size=64, plan=plan)
    with pytest.raises(InvalidInput, match="resolve it with partial=True"):
        block_attention(
            **{**x, "q": x["q"][:, :9], "blocks": x["blocks"][:, :9]}, block_size=512, plan=plan
        )
    whole = resolve(NSAConfig(64, 4, 2), device="cpu")
    with pytest.raises(InvalidInput, match=r"plan_block_attention\(\) returns, got Plan"):
        block_attention(**x, block_size=512, plan=whole)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size must be an integer >= 1, got 0"),
        ({"block_size": 300}, "block_size above 128 must be a multiple of 128, got 300"),
        ({"block_size": 16.0}, "block_size must be an integer >= 1, got 16.0"),
        ({"first_query": -1}, "first_query must be an integer >= 0, got -1"),
        ({"blocks": "first"}, "blocks must be a tensor, got str"),
        ({"blocks": torch.zeros(2, 150, 2, 5)}, "blocks must be integers, got torch.float32"),
        ({"q": torch.zeros(150, 6, 24)}, r"q must have 4 axes \[B, S, heads, width\]"),
        ({"k": torch.zeros(2, 150, 4, 24)}, "6 query heads do not divide over 4"),
        ({"v": torch.zeros(2, 150, 2, 8, dtype=torch.float64)}, "q, k, v must share one dtype"),
        ({"backends": "spda"}, "sdpa"),
        ({"backends": {"sel": "sdpa"}}, "backends must be None or the name of a backend, got {"),
        ({"first_query": 100}, "k"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        block_attention(**{**problem(), "block_size": SIZE, **changes})
    assert re.search(message, str(error.value)), str(error.value)


def test_a_refusal_lists_the_reasons_of_this_slot() -> None:
    with pytest.raises(Unsupported) as error:
        block_attention(**problem(), block_size=SIZE, backends="triton")
    text = str(error.value)
    assert "'triton' cannot run sel" in text
    assert "cmp" not in text


def test_it_compiles_without_graph_breaks() -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor) -> Any:
        return block_attention(q, k, v, blocks, block_size=SIZE)

    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    for tokens in (150, 170):
        x = problem((2, tokens))
        assert torch.equal(compiled(**x), call(**x))


def test_plans_are_for_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward-only backend serves calls without gradient."""
    plan = plan_block_attention(
        6, 2, 24, v_head_dim=8, block_size=SIZE, n_blocks=5, backends="sdpa"
    )
    assert not plan.request.needs_grad
    assert dataclasses.asdict(plan.choice)["explicit"]
