"""The loss of an indexer and its gradients against autograd of the plain formula in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nsa_core.errors import InvalidInput
from nsa_models.recipes import indexer_loss as module
from nsa_models.recipes.indexer_loss import indexer_loss

TOKENS, SIZE, WIDTH, INDEX_WIDTH = 41, 8, 6, 5
HEADS = [(4, 2, 2), (8, 4, 2), (8, 2, 4), (4, 4, 1), (4, 1, 4)]  # of q, k and the indexer


def problem(
    heads: int, groups: int, chosen: int, shared: bool = True, tokens: int = TOKENS
) -> dict[str, torch.Tensor]:
    """Return tensors in float64; blocks are the query's own and up to 2 others, in any order."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(2, *size, generator=generator, dtype=torch.float64).requires_grad_()

    blocks = torch.full((2, tokens, chosen, 3), -1)
    for row in blocks.view(-1, 3).unflatten(0, (2, tokens, chosen)):
        for t in range(tokens):
            for i in range(chosen):
                earlier = torch.randperm(t // SIZE, generator=generator)[:2]
                own = torch.tensor([t // SIZE])
                row[t, i, : len(earlier) + 1] = torch.cat([earlier, own])
    return {
        "q": draw(tokens, heads, WIDTH),
        "k": draw(tokens, groups, WIDTH),
        "index_q": draw(tokens, chosen, INDEX_WIDTH),
        "index_k": draw(tokens, INDEX_WIDTH) if shared else draw(tokens, chosen, INDEX_WIDTH),
        "blocks": blocks,
    }


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    blocks: torch.Tensor,
    scale: float = WIDTH**-0.5,
    index_scale: float = INDEX_WIDTH**-0.5,
) -> torch.Tensor:
    """Return the formula of the docstring, one query and one head of the indexer at a time."""
    heads, groups, chosen = q.shape[2], k.shape[2], index_q.shape[2]
    terms = []
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for i in range(chosen):
                own = set(blocks[b, t, i].tolist())
                keys = [s for s in range(t + 1) if s // SIZE in own]
                if not keys:
                    terms.append(q.new_zeros(()))
                    continue
                p = torch.stack(
                    [
                        (k[b, keys, h // (heads // groups)] @ q[b, t, h] * scale).softmax(0)
                        for h in range(i * heads // chosen, (i + 1) * heads // chosen)
                    ]
                )
                p = p.mean(0).detach()
                ik = index_k[b, keys] if index_k.dim() == 3 else index_k[b, keys, i]
                r = (ik @ index_q[b, t, i] * index_scale).softmax(0)
                terms.append((p * (p / r).log()).sum())
    return torch.stack(terms).mean()


@pytest.mark.parametrize("shared", [True, False], ids=["one key head", "key heads"])
@pytest.mark.parametrize(("heads", "groups", "chosen"), HEADS)
def test_loss_and_gradients_match_the_formula(heads, groups, chosen, shared):
    x = problem(heads, groups, chosen, shared)
    loss, expected = indexer_loss(**x, block_size=SIZE), plain(**x)
    assert float(expected.detach()) > 0.05
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-12)
    leaves = [x["index_q"], x["index_k"]]
    found = torch.autograd.grad(3 * loss, leaves)
    for a, b in zip(found, torch.autograd.grad(3 * expected, leaves), strict=True):
        assert float(b.abs().max()) > 1e-4
        assert float((a - b).abs().max()) < 1e-14


def test_no_gradient_reaches_the_main_attention():
    x = problem(4, 2, 2)
    indexer_loss(**x, block_size=SIZE).backward()
    assert x["q"].grad is None
    assert x["k"].grad is None
    assert x["index_q"].grad is not None


def test_scales_and_parts_change_nothing(monkeypatch):
    """With 3 queries at a time, and other scales."""
    x = problem(4, 2, 2)
    scales = {"scale": 0.3, "index_scale": 2.0}
    expected = plain(**x, **scales)
    monkeypatch.setattr(module, "GATHERED", 2 * 3 * 3 * SIZE * WIDTH)
    loss = indexer_loss(**x, block_size=SIZE, **scales)
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-12)
    a, b = (torch.autograd.grad(y, x["index_k"])[0] for y in (loss, expected))
    assert float((a - b).abs().max()) < 1e-14


def test_queries_without_blocks_add_nothing():
    x = problem(4, 2, 2)
    x["blocks"][:, 10:20] = -1
    loss, expected = indexer_loss(**x, block_size=SIZE), plain(**x)
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-12)
    loss.backward()
    assert x["index_q"].grad is not None
    assert float(x["index_q"].grad[:, 10:20].abs().max()) == 0
    assert bool(x["index_k"].grad.isfinite().all())


def test_queries_inside_a_sequence():
    x = problem(4, 2, 2)
    rows = {n: t if n in ("k", "index_k") else t[:, 30:] for n, t in x.items()}
    last = indexer_loss(**rows, block_size=SIZE, first_query=30)
    x["blocks"][:, :30] = -1
    whole = indexer_loss(**x, block_size=SIZE)
    assert math.isclose(last.item() * 11, whole.item() * TOKENS, rel_tol=1e-12)


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_computes_in_float32(autocast):
    x = {
        n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in problem(4, 2, 2).items()
    }
    x = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in x.items()}
    wide = {n: t.detach().double() if t.is_floating_point() else t for n, t in x.items()}
    wide["index_q"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = indexer_loss(**x, block_size=SIZE)
    expected = plain(**wide)
    assert loss.dtype == torch.float32
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-5)
    loss.backward()
    expected.backward()
    assert x["index_q"].grad.dtype == torch.bfloat16
    error = (x["index_q"].grad - wide["index_q"].grad).abs().max()
    assert float(error) < 2**-8 * float(wide["index_q"].grad.abs().max())


def test_training_on_the_loss_makes_it_small():
    """The indexer learns an attention that it can express: its own queries and keys."""
    x = problem(2, 1, 1)
    x["index_q"], x["index_k"] = torch.randn(2, TOKENS, 1, 6), torch.randn(2, TOKENS, 6)
    x = {n: t.detach().float() if t.is_floating_point() else t for n, t in x.items()}
    x["q"] = x["q"][:, :, :1].expand(-1, -1, 2, -1)
    leaves = [x[n].requires_grad_() for n in ("index_q", "index_k")]
    optimizer = torch.optim.Adam(leaves, 0.05)
    losses = []
    for _ in range(150):
        loss = indexer_loss(**x, block_size=SIZE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.3
    assert 0 <= losses[-1] < 0.02


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"index_k": torch.zeros(2, 40, 5)}, {}, r"index_k must be \[2, 41, 2, 5\], got"),
        ({"blocks": torch.zeros(2, 41, 3, 3)}, {}, r"blocks must be \[2, 41, 2, 3\], got"),
        ({"q": torch.zeros(2, 41, 3, 6)}, {}, "q 3, k 2 and index_q 2"),
        ({}, {"block_size": 0}, "block_size must be an integer >= 1, got 0"),
        ({}, {"first_query": 1}, "from first_query 1 on need 42 keys, got 41"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes: Any, options: Any, message: str):
    with pytest.raises(InvalidInput, match=message):
        indexer_loss(**(problem(4, 2, 2) | changes), **({"block_size": SIZE} | options))
