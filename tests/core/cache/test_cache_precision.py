"""Steps in fp32, bf16 and fp16: what lies in the cache, and what every slot makes of it, in units
of rounding noise.

A slot is judged on bit for bit the tensors it received, the stores read back as the whole sequences
that they hold.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from caches import OPTIONS, layer_of, poisoned_cache, tokens
from nsa_core import InvalidInput
from nsa_verify.judge.selection import judge_selection
from nsa_verify.judge.slot import judge_slot
from nsa_verify.judge.tensor import judge

LENGTH = 45
PIECES = (10, *[1] * 8, 5, *[1] * 14, 8)  # sum 45


class Recorded:
    """A decode kernel, and what it was given and gave."""

    def __init__(self, kernel, rows):
        self.kernel, self.rows = kernel, rows

    def __call__(self, *tensors, **options):
        results = self.kernel(*tensors, **options)
        self.rows.append((tensors, (results,) if isinstance(results, torch.Tensor) else results))
        return results


def recorded(plan):
    rows = {slot: [] for slot in ("cmp", "select", "sel", "win", "combine")}
    return rows, dataclasses.replace(
        plan, **{slot: Recorded(getattr(plan, slot), rows[slot]) for slot in rows}
    )


def contents(cache, first):
    """Keys and values of the whole sequences, by the contract's names; of the rings, tokens from
    ``first`` on.
    """
    geometry, table = cache.config.geometry, cache.table.entries.long()
    n_c, found = geometry.num_compressed(LENGTH), {}
    for name, pair, count in (("sel", cache.stores.sel, LENGTH), ("cmp", cache.stores.cmp, n_c)):
        found[name] = [store[table].flatten(1, 2)[:, :count] for store in (pair.k, pair.v)]
    for name, pair in (("win", cache.stores.win), ("raw", cache.stores.raw)):
        found[name] = [
            store[:, torch.arange(first, LENGTH) % pair.rows] for store in (pair.k, pair.v)
        ]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("option", ["mlp", *OPTIONS])
def test_steps_in_low_precision(option, dtype):
    attn = layer_of(dtype, **OPTIONS.get(option, {}))
    x = tokens(attn, 2, LENGTH)
    # rings that hold all but a few tokens
    cache = poisoned_cache(attn, 2, LENGTH, page_size=16, max_rollback=40)
    rows, plan = recorded(cache.plan)
    parts = x.split(PIECES, 1)
    attn(parts[0], cache=cache)
    for part in parts[1:]:
        attn(part, cache=cache, plan=plan)
    first = LENGTH - min(cache.stores.win.rows, cache.stores.raw.rows, LENGTH)
    held = contents(cache, first)
    judge_projections(attn, x, held, first, dtype)
    judge_slots(attn.config, rows, held, first)


def judge_projections(attn, x, held, first, dtype):
    """What is stored is as good as what a prefill projects: both against the layer in float64."""
    with torch.no_grad():
        exact = copy.deepcopy(attn).double().project_with_raw(x.double())
        plain = attn.project_with_raw(x)
    wanted = {
        name: [
            (
                (p.k_cmp, p.v_cmp),
                (p.k[1], p.v[1]),
                (p.k[2][:, first:], p.v[2][:, first:]),
                tuple(part[:, first:] for part in raw),
            )[i]
            for p, raw in (plain, exact)
        ]
        for i, name in enumerate(("cmp", "sel", "win", "raw"))
    }
    for name, (rounded, golden) in wanted.items():
        for got, r, g in zip(held[name], rounded, golden):
            got, r, g = (t.transpose(1, 2) for t in (got, r, g))
            if (
                name == "cmp"
                # a step's one block is one product, and 8 elements rounded apart are a matter of
                # luck
            ):
                got, r, g = (t.flatten(2).unsqueeze(2) for t in (got, r, g))
            verdict = judge(got, g, r, g.abs(), dtype)
            assert verdict, (name, verdict.why)


def judge_slots(config, rows, held, first):
    geometry, scale, start = config.geometry, config.softmax_scale, PIECES[0]
    taken = list(range(start, LENGTH))
    q = padded(torch.cat([tensors[0] for tensors, _ in rows["cmp"]], 1), start)
    given = {
        "cmp": {"q": q, "k_cmp": held["cmp"][0], "v_cmp": held["cmp"][1]},
        "sel": {"q": q, "k": held["sel"][0], "v": held["sel"][1]},
        "win": {"q": q, "k": padded(held["win"][0], first), "v": padded(held["win"][1], first)},
    }
    given["sel"]["blocks"] = padded(
        torch.cat([results[0] for _, results in rows["select"]], 1), start, -1
    )
    for slot, inputs in given.items():
        o, lse = (torch.cat([results[i] for _, results in rows[slot]], 1 + i) for i in range(2))
        got = {
            "o": padded(o, start),
            "lse": padded(lse.transpose(1, 2), start).transpose(1, 2).contiguous(),
        }
        judged = (
            taken if slot != "win" else [t for t in taken if t - config.window_size + 1 >= first]
        )
        for name, verdict in judge_slot(slot, inputs, got, geometry, scale, rows=judged).items():
            assert verdict, (slot, name, verdict.why)
        if slot == "cmp":
            verdict = judge_selection(
                q, inputs["k_cmp"], got["lse"], given["sel"]["blocks"], geometry, scale, rows=taken
            )
            assert verdict.ok, verdict.why
    assert len(judged) > 20
    for tensors, (o,) in rows["combine"]:
        inputs = dict(zip(("gates", "o_cmp", "o_sel", "o_win"), tensors))
        assert all(judge_slot("combine", inputs, {"o": o}, geometry, scale).values())


def padded(x, start, value=0):
    """Tokens ``start`` on of [B, S - start, ...], as [B, S, ...]."""
    head = x.new_full((x.shape[0], start, *x.shape[2:]), value)
    return torch.cat([head, x], 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_same_blocks_from_the_same_tensors(dtype):
    """Given identical q, k_cmp and LSE, decode chooses what prefill chooses."""
    attn = layer_of(dtype)
    x = tokens(attn, 2, LENGTH)
    cache = poisoned_cache(attn, 2, LENGTH, page_size=16)
    rows, plan = recorded(cache.plan)
    attn(x[:, :10], cache=cache)
    for t in range(10, LENGTH):
        attn(x[:, t : t + 1], cache=cache, plan=plan)
    k_cmp = contents(cache, LENGTH)["cmp"][0]
    q = padded(torch.cat([tensors[0] for tensors, _ in rows["select"]], 1), 10)
    lse = torch.cat([tensors[2] for tensors, _ in rows["select"]], 2)
    lse = torch.cat([lse.new_full((*lse.shape[:2], 10), -torch.inf), lse], 2)
    blocks = attn.plan.select(q, k_cmp, lse)
    assert torch.equal(blocks[:, 10:], torch.cat([results[0] for _, results in rows["select"]], 1))


def test_autocast():
    """Projections in bf16 over parameters in fp32: the cache takes autocast's dtype, and is refused
    outside.
    """
    attn = layer_of(torch.float32)
    x = tokens(attn, 2, LENGTH)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = poisoned_cache(attn, 2, LENGTH)
        assert cache.dtype == torch.bfloat16
        assert torch.equal(attn(x[:, :30], cache=cache), attn(x[:, :30]))
        for t in range(30, LENGTH - 1):
            y = attn(x[:, t : t + 1], cache=cache)
            assert y.dtype == torch.bfloat16
            assert torch.isfinite(y).all()
    with pytest.raises(
        InvalidInput, match=r"computes torch\.float32 on cpu, the cache is torch\.bfloat16"
    ):
        attn(x[:, -1:], cache=cache)
