"""block_attention: attention to given blocks, judged by the oracle and by a dense mask."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from nsa_core import (
    InvalidInput,
    NSAConfig,
    Unsupported,
    block_attention,
    block_attention_with_lse,
    nsa_attention,
    plan_block_attention,
    resolve,
)
from nsa_core.block.plans import BlockSizes, resolve_blocks
from nsa_core.layout import BlockGeometry
from nsa_core.plan.default_plan import ObjectCache
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import resolve_slot
from slot_results import assert_slot_correct

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
    blocks[..., 1:2][torch.rand(*lead, 2, 1) < 0.1] = -(2**31)
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


@pytest.mark.few_cases
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
    o, lse = block_attention_with_lse(**x, block_size=SIZE, **options)
    assert not lse.requires_grad
    do = torch.randn_like(o)
    grads = torch.autograd.grad(o, [x["q"], x["k"], x["v"]], do)
    outputs = {"o": o, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads))}
    assert_slot_correct(
        "sel",
        {name: t.detach() for name, t in x.items()},
        {name: t.detach() for name, t in outputs.items()},
        geometry(SIZE, x["blocks"].shape[-1]),
        24**-0.5,
        do=do,
        cu_seqlens=options.get("cu_seqlens"),
        first_query=first,
    )


@pytest.mark.few_cases("5", "16", "128", "192", "256")
@pytest.mark.parametrize("size", [5, 16, 128, 192, 256, 300, 384, 512, 528])
def test_blocks_of_any_size_match_a_dense_mask(size: int) -> None:
    """Blocks above 256 keys are split, into blocks of 256, 128, 64, 32 or 16 keys."""
    tokens = 2 * size + 90
    x = problem((1, tokens), n=3, count=tokens // size + 2)
    o = block_attention(**x, block_size=size)
    expected = masked(**x, size=size)
    assert float((o - expected).detach().abs().max()) < 1e-5
    o.sum().backward()
    grads = [x[name].grad for name in ("q", "k", "v")]
    wanted = torch.autograd.grad(expected.sum(), [x["q"], x["k"], x["v"]])
    for a, b in zip(grads, wanted, strict=True):
        assert a is not None
        assert float((a - b).abs().max()) < 1e-4


@pytest.mark.few_cases("16")
@pytest.mark.parametrize("size", [16, 256])
def test_256_blocks_match_a_dense_mask(size: int) -> None:
    x = problem((1, 400), n=256, count=400 // size + 2)
    x["blocks"][:, 300] = -1
    x["blocks"][:, 300, :, 255] = 0
    o = block_attention(**x, block_size=size)
    assert float((o - masked(**x, size=size)).detach().abs().max()) < 1e-5


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
    o, lse = block_attention_with_lse(**x, block_size=SIZE)
    assert not o.any()
    assert (lse == -torch.inf).all()
    empty = block_attention(**{**x, "blocks": x["blocks"][..., :0]}, block_size=SIZE)
    assert torch.equal(empty, o)


def test_it_is_the_selected_branch_of_nsa() -> None:
    x = problem()
    gates = torch.zeros(2, 150, 6, 3)
    gates[..., 1] = 1
    config = NSAConfig(
        144,
        6,
        2,
        24,
        8,
        compress_block_size=8,
        compress_stride=4,
        select_block_size=SIZE,
        num_selected_blocks=5,
    )
    o = nsa_attention(x["q"], x["k"], x["v"], gates, config=config, blocks=x["blocks"])
    assert torch.equal(block_attention(**x, block_size=SIZE), o)
    assert torch.equal(block_attention(**x, block_size=SIZE, first_query=0), o)


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
    assert plan.request.geometry.select_block_size == 256
    assert plan.explain().splitlines()[1].startswith("sel: sdpa ")
    assert "cmp" not in plan.explain().replace("compress", "")
    x = problem()
    expected = block_attention(**x, block_size=512)
    assert torch.equal(block_attention(**x, block_size=512, plan=plan), expected)
    assert plan.explain().splitlines()[-1].strip() == "5 blocks of 512 keys run as 10 blocks of 256"


@pytest.mark.parametrize(
    ("planned", "called", "message"),
    [
        ({}, {"block_size": 64}, "plan is for 5 blocks of 512 keys, the call has 5 blocks of 64"),
        ({"n_blocks": 4}, {}, "plan is for 4 blocks of 512 keys, the call has 5 blocks of 512"),
        ({"n_kv_heads": 1}, {}, "plan is for n_kv_heads 1, the call has 2"),
        ({"v_head_dim": None}, {}, "plan is for v_head_dim 24, the call has 8"),
        ({"scale": 2.0}, {"scale": 3}, r"plan is for scale 2\.0, the call has 3\.0"),
        ({}, {"scale": float("nan")}, r"scale must be finite \(a number\) or None, got nan"),
        ({"dtype": "bfloat16"}, {}, "plan is for bfloat16 on cpu, but the tensors are float32"),
        (
            {"needs_grad": False},
            {},
            "plan was resolved without needs_grad=True, but the call needs a",
        ),
        ({}, {"first_query": 2}, "plan was resolved without partial=True, but q begins inside"),
        ({}, {"cu_seqlens": 0}, "plan was resolved without varlen=True, but cu_seqlens is passed"),
        ({}, {"backends": "sdpa"}, "plan and backends='sdpa' are both passed"),
        (
            {},
            {"plan": "sdpa"},
            r"plan_block_attention\(\) returns, got str; pass the name of a back",
        ),
        ({}, {"plan": resolve(NSAConfig(64, 4, 2))}, r"_attention\(\) returns, got Plan"),
    ],
)
def test_a_plan_for_another_call_is_refused(
    planned: dict[str, Any], called: dict[str, Any], message: str
) -> None:
    sizes: dict[str, Any] = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 24, "v_head_dim": 8}
    options: dict[str, Any] = {"block_size": 512, "n_blocks": 5, "needs_grad": True}
    plan = plan_block_attention(**{**sizes, **options, **planned})
    x = problem()
    if "first_query" in called:
        x["q"], x["blocks"] = x["q"][:, 2:], x["blocks"][:, 2:]
    if "cu_seqlens" in called:
        x = {name: t[0] for name, t in x.items()}
        called = {"cu_seqlens": torch.tensor([0, 150], dtype=torch.int32)}
    with pytest.raises(InvalidInput, match=message):
        block_attention(**{**x, "block_size": 512, "plan": plan, **called})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_blocks": 0}, "n_blocks must be an integer >= 1, got 0"),
        ({"v_head_dim": 0}, "v_head_dim must be an integer >= 1, got 0"),
        ({"n_heads": 6.0}, r"n_heads must be an integer >= 1, got 6\.0"),
        ({"n_heads": 5}, "5 query heads do not divide over 2"),
        ({"block_size": -1}, "block_size must be an integer >= 1, got -1"),
        ({"scale": float("inf")}, "scale must be finite"),
        ({"phase": "decode", "page_size": "a"}, "page_size must be an integer >= 1, got 'a'"),
    ],
)
def test_bad_sizes_of_a_plan_are_named(changes: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 24}
    with pytest.raises(InvalidInput, match=message):
        plan_block_attention(**{**sizes, "block_size": 64, "n_blocks": 4, **changes})


def test_plans_are_immutable_values() -> None:
    plan = plan_block_attention(
        6, 2, 24, block_size=512, n_blocks=5, scale=0.5, backends="sdpa", needs_grad=True
    )
    assert copy.copy(plan) is plan
    assert copy.deepcopy(plan) is plan
    again = pickle.loads(pickle.dumps(plan))
    assert again is not plan
    assert (again.sizes, again.request) == (plan.sizes, plan.request)
    assert again.choice.explicit
    slot = resolve_slot(NSAConfig(64, 4, 2), "win", device="cpu", varlen=True)
    assert pickle.loads(pickle.dumps(slot)).request == slot.request
    assert copy.deepcopy(slot) is slot


def test_threads_share_no_name_of_a_plan() -> None:
    """Two first calls at once: both name their plans, then both store them, then both read them."""
    barrier = threading.Barrier(2, timeout=60)

    class Plans(ObjectCache[int]):
        def __setattr__(self, name: str, plan: object) -> None:
            if not name.startswith("object_"):
                return super().__setattr__(name, plan)
            barrier.wait()
            super().__setattr__(name, plan)
            barrier.wait()

    plans = Plans(lambda number: 10 * number)
    with ThreadPoolExecutor(2) as pool:
        names = list(pool.map(plans.name_of, (23, 29)))
    assert [getattr(plans, name) for name in names] == [230, 290]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size must be an integer >= 1, got 0"),
        ({"scale": "a"}, "scale must be finite"),
        ({"scale": [1.0]}, "scale must be finite"),
        ({"block_size": 16.0}, "block_size must be an integer >= 1, got 16.0"),
        ({"first_query": -1}, "first_query must be an integer >= 0, got -1"),
        ({"first_query": 1.0}, r"first_query must be an integer >= 0, got 1\.0"),
        (
            {"first_query": 100},
            "k and v have 150 rows, but the 150 rows of q from first_query = 100 on",
        ),
        ({"k": torch.zeros(2, 160, 2, 24), "v": torch.zeros(2, 160, 2, 8)}, "pass first_query, th"),
        ({"blocks": "first"}, "blocks must be a tensor, got str"),
        ({"blocks": torch.zeros(2, 150, 2, 5)}, "blocks must be integers, got float32"),
        ({"blocks": torch.zeros(2, 150, 2, 5).bool()}, r"blocks must be integers, got bool \(q \["),
        ({"q": torch.zeros(150, 6, 24)}, r"\[B, S, Hq, Dk\], got \[150, 6, 24\]: add the ba"),
        ({"k": torch.zeros(2, 150, 3, 24)}, "k has 3 key/value heads, but v and blocks have 2"),
        (
            {"v": torch.zeros(2, 150, 2, 8, dtype=torch.float64)},
            "v is float64, but q and k are float32: pass v.to",
        ),
        ({"backends": "spda"}, "sdpa"),
        ({"backends": {"sel": "sdpa"}}, "backends must be None or the name of a backend, got {"),
        ({"backends": {"cmb": "sdpa"}}, "unknown slot 'cmb'"),
        ({"max_seqlen": 9}, "max_seqlen goes with cu_seqlens"),
        ({"cu_seqlens": [0, 150]}, r"pass torch\.tensor\(cu_seqlens, dtype=torch\.int32"),
        ({"q": torch.zeros(2, 150, 6, 24).to_sparse()}, r"q is sparse .*pass q\.to_dense\(\)"),
        ({"q": torch.zeros(2, 150, 7, 24)}, "q has 7 heads and k has 2: the number of"),
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


def test_chunks_compile_without_graph_breaks() -> None:
    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, first: int
    ) -> Any:
        return block_attention(q, k, v, blocks, block_size=SIZE, first_query=first)

    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    x = {name: t.detach() for name, t in problem().items()}
    whole = block_attention(**x, block_size=SIZE)
    for first, end in ((0, 40), (40, 90), (90, 150)):
        chunk = {name: x[name][:, first:end] for name in ("q", "blocks")}
        o = compiled(**{**x, **chunk}, first=first)
        assert torch.allclose(o, whole[:, first:end], atol=1e-6)


def test_a_forward_only_backend_serves_calls_without_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The default plan asks for gradients first, and does without them if the call does."""
    asked = []

    def forward_only(sizes: BlockSizes, options: PlanOptions) -> Any:
        asked.append(options.needs_grad)
        if options.needs_grad:
            raise Unsupported("has no backward")
        return resolve_blocks(sizes, options)

    monkeypatch.setattr("nsa_core.block.plans.resolve_blocks", forward_only)
    x = problem()
    with pytest.raises(Unsupported, match="has no backward"):
        block_attention(**x, block_size=31)
    with torch.no_grad():
        o = block_attention(**x, block_size=31)
    assert torch.allclose(o.double(), masked(**x, size=31), atol=1e-5)
    assert asked == [True, True, False]


def test_packed_documents_are_refused_under_vmap() -> None:
    x = {name: t.detach()[0] for name, t in problem().items()}
    bounds = torch.tensor([0, 70, 150], dtype=torch.int32)

    def of_q(q: torch.Tensor) -> Any:
        return block_attention(**{**x, "q": q}, block_size=SIZE, cu_seqlens=bounds)

    with pytest.raises(Unsupported, match="not supported under"):
        torch.vmap(of_q)(torch.stack([x["q"], x["q"]]))


class Blocks(torch.nn.Module):
    """block_attention as a module, which torch.export requires."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        blocks: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
    ) -> Any:
        return block_attention(q, k, v, blocks, block_size=384, cu_seqlens=cu_seqlens)


def test_it_exports_with_a_dynamic_length() -> None:
    tokens = {1: torch.export.Dim("S", min=2, max=2**17)}
    program = torch.export.export(
        Blocks(), tuple(problem((2, 150)).values()), dynamic_shapes=(tokens,) * 4
    )
    for length in (90, 333):
        x = problem((2, length))
        assert torch.equal(program.module()(*x.values()), Blocks()(**x))


def test_packed_documents_do_not_export_with_a_dynamic_length() -> None:
    tokens = {0: torch.export.Dim("T", min=2, max=2**17)}
    bounds = torch.tensor([0, 70, 150], dtype=torch.int32)
    with pytest.raises(Unsupported, match="cannot be exported with a dynamic number of rows"):
        torch.export.export(
            Blocks(),
            (*problem((150,)).values(), bounds),
            dynamic_shapes=(*(tokens,) * 4, None),
            strict=False,
        )


def test_block_sizes_without_a_divisor_run_whole() -> None:
    plan = plan_block_attention(6, 2, 24, block_size=300, n_blocks=3)
    assert plan.request.geometry.select_block_size == 300
    assert (plan.choice.backend, len(plan.explain().splitlines())) == ("sdpa", 4)
