"""Four errors that reports on another implementation attributed to numerics or to FlashAttention-2.

Each was measured against a reference that ran one query against L keys with ``is_causal=True``.
PyTorch aligns this mask top-left: query 0 sees only key 0, so the reference returned the value of
the first key. These tests repeat each comparison, show that the number is the distance to V[first],
and judge the slot against the float64 oracle on the same tensors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_core import NSAConfig, resolve
from nsa_verify import oracle
from slot_results import assert_slot_correct, results_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def top_left_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute the old reference for one query [h, D] and keys [L, D]: a causal mask with Lq = 1."""
    # top-left aligned: only key 0 is visible
    mask = torch.ones(1, len(k), dtype=torch.bool, device=q.device).tril()
    heads = len(q)
    out = torch.nn.functional.scaled_dot_product_attention(
        q[None, :, None], k.expand(1, heads, -1, -1), v.expand(1, heads, -1, -1), attn_mask=mask
    )
    return out[0, :, 0]


def test_sdpa_causal_mask_with_one_query_returns_the_first_value() -> None:
    """PyTorch's is_causal mask with one query explains all four numbers."""
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    # lint: top-left on purpose
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])
    torch.testing.assert_close(top_left_reference(q[0, :, 0], k[0, 0], v[0, 0])[0], v[0, 0, 0])


def spans(device: str, seed: int, span: int = 4) -> dict[str, torch.Tensor]:
    """Create the reported selection case: query t attends to keys t-span+1 .. t.

    B=2, S=6, G=1, h=2, D=32, 16 keys, float32.
    """
    torch.manual_seed(seed)
    q = torch.randn(2, 6, 1, 2, 32, device=device)
    k, v = (torch.randn(2, 1, 16, 32, device=device).transpose(1, 2) for _ in range(2))
    return {"q": q.flatten(2, 3), "k": k[:, :6], "v": v[:, :6]}


def distance_to_first(inputs: dict[str, torch.Tensor], window: int) -> tuple[float, float]:
    """Return two distances of the top-left reference.

    These are its mean absolute error to windowed attention, and its largest distance to V of the
    first visible key.
    """
    q, k, v = (inputs[n] for n in "qkv")
    heads = q.shape[2] // k.shape[2]
    exact = oracle.win(q, k, v, _config(q, k, v, window).geometry, q.shape[-1] ** -0.5).o
    reference = torch.zeros_like(exact)
    first_value = torch.zeros_like(exact)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            start = max(0, t - window + 1)
            for g in range(k.shape[2]):
                rows = slice(g * heads, (g + 1) * heads)
                keys, values = k[b, start : t + 1, g].float(), v[b, start : t + 1, g].float()
                reference[b, t, rows] = (
                    top_left_reference(q[b, t, rows].float(), keys, values).double().cpu()
                )
                first_value[b, t, rows] = v[b, start, g].double().cpu()
    return (
        float((exact - reference).abs().mean()),
        float((reference - first_value).abs().max()),
    )


def _config(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, **blocks: int
) -> NSAConfig:
    return NSAConfig(
        dim=q.shape[2] * q.shape[3],
        n_heads=q.shape[2],
        n_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        v_head_dim=v.shape[3],
        window_size=window,
        **blocks,
    )


def judge_window(inputs: dict[str, torch.Tensor], window: int) -> float:
    """Judge the win slot, forward and backward; return its mean absolute error to the oracle."""
    config = _config(*inputs.values(), window)
    device = inputs["q"].device
    plan = resolve(config, device=device, dtype=inputs["q"].dtype, needs_grad=True)
    do = torch.randn_like(inputs["q"])  # v is as wide
    outputs = results_of(plan.win, inputs, do)
    sizes = (config.geometry, config.softmax_scale)
    assert_slot_correct("win", inputs, outputs, *sizes, do=do)
    exact = oracle.win(*inputs.values(), *sizes).o
    return float((outputs["o"].double().cpu() - exact).abs().mean())


@pytest.mark.parametrize("device", DEVICES)
def test_0_575_cuda_varlen_selection(device: str, figure: Any) -> None:
    """'CUDA varlen selection, MAE 0.575 (tolerance 1e-5)' is the distance to V[first]."""
    inputs = spans(device, seed=0)
    number, to_first = distance_to_first(inputs, window=4)
    assert to_first < 1e-6  # fp32 softmax over one visible key
    if device == "cuda":
        assert number == pytest.approx(0.575, abs=0.003)
    mean = sum(distance_to_first(spans("cpu", seed), window=4)[0] for seed in range(40)) / 40
    assert mean == pytest.approx(0.575, abs=0.02)
    errors = judge_window(inputs, window=4), _selection_mae(inputs)
    figure(
        f"MAE {errors[0]:.1e} by win, {errors[1]:.1e} by sel (1e-5 allowed); to V[first]"
        f" {number:.3f}"
    )
    assert max(errors) < 1e-5


def _selection_mae(inputs: dict[str, torch.Tensor]) -> float:
    """Run sel with blocks of one token on the same four keys; return its MAE to the oracle."""
    q, k, v = inputs.values()
    sizes = {
        "compress_block_size": 1,
        "compress_stride": 1,
        "select_block_size": 1,
        "num_selected_blocks": 4,
    }
    config = _config(q, k, v, 4, **sizes)
    t = torch.arange(q.shape[1], device=q.device)
    blocks = t[:, None] - torch.arange(3, -1, -1, device=q.device)
    blocks = blocks.clamp(min=-1)[None, :, None].expand(q.shape[0], -1, 1, -1).int()
    o, _ = resolve(config, device=q.device, dtype=q.dtype).sel(q, k, v, blocks)
    exact = oracle.win(q, k, v, config.geometry, config.softmax_scale).o
    return float((o.double().cpu() - exact).abs().mean())


@pytest.mark.parametrize("device", DEVICES)
def test_0_766_sliding_fa2(device: str) -> None:
    """'Sliding FA-2, MAE 0.766: fundamental limitation' is the distance to V[first].

    B=2, S=64, G=2, h=2, D=64, w=32, float16.
    """
    torch.manual_seed(0)
    q = torch.randn(2, 64, 2, 2, 64, device=device, dtype=torch.float16).flatten(2, 3)
    k, v = (
        torch.randn(2, 2, 64, 64, device=device, dtype=torch.float16).transpose(1, 2)
        for _ in range(2)
    )
    inputs = {"q": q, "k": k, "v": v}
    number, to_first = distance_to_first(inputs, window=32)
    assert to_first < 1e-6  # fp32 softmax over one visible key
    assert number == pytest.approx(0.766, abs=0.003 if device == "cuda" else 0.04)
    assert judge_window(inputs, window=32) < 2e-4


def test_0_629_selection_on_the_cpu() -> None:
    """0.629 was reported without shapes; the case of 0.575 on a CPU with seed 0 gives 0.628."""
    inputs = spans("cpu", seed=0)
    number, to_first = distance_to_first(inputs, window=4)
    assert to_first < 1e-6
    assert number == pytest.approx(0.629, abs=0.002)
    assert judge_window(inputs, window=4) < 1e-5
    assert _selection_mae(inputs) < 1e-5


def test_0_325_spans_of_two_keys() -> None:
    """0.325 was reported without shapes; spans of two keys give 0.27 to 0.37.

    These are the means over two and three queries. The first query sees only one key, so its
    reference is correct, and the mean is smaller in a shorter case.
    """
    means = []
    for queries in (2, 3):
        cases = [{n: t[:, :queries] for n, t in spans("cpu", seed).items()} for seed in range(40)]
        distances = [distance_to_first(case, window=2) for case in cases]
        assert max(to_first for _, to_first in distances) < 1e-6
        means.append(sum(number for number, _ in distances) / len(distances))
        assert judge_window(cases[0], window=2) < 1e-5
    assert means[0] < 0.325 < means[1]
