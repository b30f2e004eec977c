"""Steps in fp32, bf16 and fp16: cached values and outputs of every slot are judged.

Each slot is judged on exactly the tensors that it received. The cache is read back as whole
sequences.
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
STEPS = (10, *[1] * 8, 5, *[1] * 14, 8)  # sum 45


class RecordingKernel:
    """A decode kernel that records its inputs and outputs."""

    def __init__(self, kernel, rows):
        self.kernel, self.rows = kernel, rows

    def __call__(self, *tensors, **options):
        results = self.kernel(*tensors, **options)
        self.rows.append((tensors, (results,) if isinstance(results, torch.Tensor) else results))
        return results


def recorded(plan):
    """The plan with recording kernels, and their records by slot."""
    rows = {slot: [] for slot in ("cmp", "select", "sel", "win", "combine")}
    return rows, dataclasses.replace(
        plan, **{slot: RecordingKernel(getattr(plan, slot), rows[slot]) for slot in rows}
    )


def contents(cache, first):
    """Keys and values of whole sequences, by branch.

    Of the rings only the tokens from ``first`` on exist.
    """
    geometry, table = cache.config.geometry, cache.table.entries.long()
    n_c, result = geometry.num_compressed(LENGTH), {}
    for name, pair, count in (
        ("sel", cache.kv.pages.sel, LENGTH),
        ("cmp", cache.kv.pages.cmp, n_c),
    ):
        result[name] = [store[table].flatten(1, 2)[:, :count] for store in (pair.k, pair.v)]
    for name, pair in (("win", cache.kv.pages.win), ("raw", cache.kv.pages.raw)):
        result[name] = [
            store[:, torch.arange(first, LENGTH) % pair.rows] for store in (pair.k, pair.v)
        ]
    return result


@pytest.mark.few_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("option", ["mlp", *OPTIONS])
def test_steps_in_low_precision(option, dtype):
    attn = layer_of(dtype, **OPTIONS.get(option, {}))
    x = tokens(attn, 2, LENGTH)
    # The rings hold all but a few tokens.
    cache = poisoned_cache(attn, 2, LENGTH, page_size=16, max_rollback=40)
    rows, plan = recorded(cache.plan)
    parts = x.split(STEPS, 1)
    attn(parts[0], cache=cache)
    for part in parts[1:]:
        attn(part, cache=cache, plan=plan)
    first = LENGTH - min(cache.kv.pages.win.rows, cache.kv.pages.raw.rows, LENGTH)
    cached = contents(cache, first)
    judge_projections(attn, x, cached, first, dtype)
    judge_slots(attn.config, rows, cached, first)


def judge_projections(attn, x, cached, first, dtype):
    """Judge the cached values like those of a prefill: both against the layer in float64."""
    with torch.no_grad():
        exact = copy.deepcopy(attn).double().project_with_raw(x.double())
        plain = attn.project_with_raw(x)
    references = {
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
    for name, (rounded, golden) in references.items():
        for got, r, g in zip(cached[name], rounded, golden):
            got, r, g = (t.transpose(1, 2) for t in (got, r, g))
            if name == "cmp":
                # Judge all blocks of a sequence together: the 8 elements of one block are too few.
                got, r, g = (t.flatten(2).unsqueeze(2) for t in (got, r, g))
            verdict = judge(got, g, r, g.abs(), dtype)
            assert verdict, (name, verdict.why)


def judge_slots(config, rows, cached, first):
    geometry, scale, start = config.geometry, config.softmax_scale, STEPS[0]
    decoded = list(range(start, LENGTH))
    q = padded(torch.cat([tensors[0] for tensors, _ in rows["cmp"]], 1), start)
    slot_inputs = {
        "cmp": {"q": q, "k_cmp": cached["cmp"][0], "v_cmp": cached["cmp"][1]},
        "sel": {"q": q, "k": cached["sel"][0], "v": cached["sel"][1]},
        "win": {"q": q, "k": padded(cached["win"][0], first), "v": padded(cached["win"][1], first)},
    }
    slot_inputs["sel"]["blocks"] = padded(
        torch.cat([results[0] for _, results in rows["select"]], 1), start, -1
    )
    for slot, inputs in slot_inputs.items():
        o, lse = (torch.cat([results[i] for _, results in rows[slot]], 1 + i) for i in range(2))
        got = {
            "o": padded(o, start),
            "lse": padded(lse.transpose(1, 2), start).transpose(1, 2).contiguous(),
        }
        positions = (
            decoded
            if slot != "win"
            else [t for t in decoded if t - config.window_size + 1 >= first]
        )
        for name, verdict in judge_slot(slot, inputs, got, geometry, scale, rows=positions).items():
            assert verdict, (slot, name, verdict.why)
        if slot == "cmp":
            verdict = judge_selection(
                q,
                inputs["k_cmp"],
                got["lse"],
                slot_inputs["sel"]["blocks"],
                geometry,
                scale,
                rows=decoded,
            )
            assert verdict.ok, verdict.why
    assert len(positions) > 20
    for tensors, (o,) in rows["combine"]:
        inputs = dict(zip(("gates", "o_cmp", "o_sel", "o_win"), tensors))
        assert all(judge_slot("combine", inputs, {"o": o}, geometry, scale).values())


def padded(x, start, value=0):
    """Prepend ``start`` tokens of ``value`` to x [B, S - start, ...]."""
    head = x.new_full((x.shape[0], start, *x.shape[2:]), value)
    return torch.cat([head, x], 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_decode_selects_the_same_blocks_as_prefill(dtype):
    """From identical q, k_cmp and LSE, decode selects the same blocks as prefill."""
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


def test_cache_under_autocast():
    """Under autocast the cache has autocast's dtype, and is refused outside of it."""
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
        InvalidInput, match=r"computes torch\.float32 on cpu, but the cache is torch\.bfloat16"
    ):
        attn(x[:, -1:], cache=cache)
