"""Cases of divided_block_attention that run on every rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from nsa_core import NSAError, block_attention, plan_block_attention
from nsa_core.parallel import Shards, divided_block_attention
from parallel_cases import FORMS, Collectives, relative_error


class BlockProblem(NamedTuple):
    """Rows of block_attention, the output gradient, and the results of one process."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    blocks: torch.Tensor
    up: torch.Tensor
    cu_seqlens: torch.Tensor | None
    results: dict[str, torch.Tensor]


BLOCK = 8  # keys of a block of a BlockProblem


def block_problem(form: str) -> BlockProblem:
    """Return a problem whose queries choose 4 blocks at random, also of the future."""
    total, bounds = FORMS[form]
    lead = (2, total) if bounds is None else (total,)
    generator = torch.Generator().manual_seed(3)

    def random(heads: int, width: int) -> torch.Tensor:
        return torch.randn(*lead, heads, width, generator=generator, dtype=torch.float64)

    blocks = torch.randint(-1, total // BLOCK + 1, (*lead, 2, 4), generator=generator)
    documents = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    q, k, v, up = random(4, 8), random(2, 8), random(2, 6), random(4, 6)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = block_attention(*leaves, blocks, block_size=BLOCK, cu_seqlens=documents)
    results = dict(zip("qkv", torch.autograd.grad(o, leaves, up))) | {"o": o.detach()}
    return BlockProblem(q, k, v, blocks, up, documents, results)


def divided_blocks(
    rank: int, world: int, *, form: str, layout: str, wrap: str = ""
) -> dict[str, float]:
    """Return the errors of divided_block_attention in float64, by tensor."""
    case = block_problem(form)
    shards = Shards(case.q.shape[-3], world, rank, layout)
    leaves = [shards.take(x, -3).clone().requires_grad_() for x in (case.q, case.k, case.v)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        own = shards.take(case.blocks, -3)
        return divided_block_attention(
            q, k, v, own, shards, block_size=BLOCK, cu_seqlens=case.cu_seqlens
        )

    if wrap == "compile":
        torch._dynamo.reset()
        o = torch.compile(attend, fullgraph=True, backend="aot_eager")(*leaves)
        grads = torch.autograd.grad(o, leaves, shards.take(case.up, -3))
    else:
        with Collectives() as seen:
            o = checkpoint(attend, *leaves, use_reentrant=False) if wrap else attend(*leaves)
            grads = torch.autograd.grad(o, leaves, shards.take(case.up, -3))
        # The backward gathers the keys and values again, once.
        assert dict(seen.counts) == {"gather_rows": 2, "scatter_sum": 1}, seen.counts
    actual = dict(zip("qkv", grads)) | {"o": o}
    return {
        name: relative_error(actual[name], shards.take(expected, -3))
        for name, expected in case.results.items()
    }


def block_refusal(rank: int, world: int, *, of: str) -> str:
    """Return the error of a call that divided_block_attention refuses."""
    case = block_problem("packed")
    shards = Shards(112, world, rank)
    own = [shards.take(x, -3) for x in (case.q, case.k, case.v, case.blocks)]
    whole = [case.q, case.k, case.v, case.blocks]
    options: dict[str, Any] = {"block_size": BLOCK, "cu_seqlens": case.cu_seqlens}
    plan = plan_block_attention(
        4,
        2,
        8,
        block_size=BLOCK,
        n_blocks=4,
        v_head_dim=6,
        varlen=True,
        device="cpu",
        dtype="float64",
    )
    short = torch.tensor([0, 56], dtype=torch.int32)
    actions = {
        "whole rows": lambda: divided_block_attention(*whole, shards, **options),
        "no shards": lambda: divided_block_attention(*own, None, **options),  # type: ignore[arg-type]
        "a plan for whole sequences": lambda: divided_block_attention(
            *own, shards, **options, plan=plan
        ),
        "the documents of one rank": lambda: divided_block_attention(
            *own, shards, **(options | {"cu_seqlens": short})
        ),
        "a transform": lambda: torch.func.vjp(
            lambda q: divided_block_attention(q, *own[1:], shards, **options), own[0]
        ),
        "other ranks": lambda: divided_block_attention(
            *[x[:28] for x in own], Shards(112, 4, 0), **options
        ),
    }
    try:
        actions[of]()
    except NSAError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
