"""cmp on cuDNN: residue views and gradient sums with a fake of cuDNN on the CPU; cuDNN on a GPU."""

from __future__ import annotations

import dataclasses
import math
import types

import pytest
import torch

from nsa_backend_sdpa import cudnn, probe
from nsa_core import resolve
from nsa_core.contract import SlotCall
from nsa_verify.judge.slot import judge_slot
from nsa_verify.problems.cases import Case, config_of
from nsa_verify.problems.slot_runs import run_kernel
from slot_requests import make_request

CONFIG = config_of(4, 2, 16, 24, (8, 4, 16, 4, 20))
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class FakeCudnn:
    """Dense causal attention with the signatures of PyTorch's cuDNN operators.

    It records the calls, and requires as many queries as keys.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def _attend(self, q, k, v, scale):
        assert q.shape[2] == k.shape[2] == v.shape[2]
        assert q.shape[1] % k.shape[1] == 0
        self.calls.append(tuple(q.shape))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2)) * scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf), k, v

    def _scaled_dot_product_cudnn_attention(
        self, q, k, v, bias, with_lse, dropout, causal, debug, *, scale
    ):
        assert bias is None
        assert with_lse
        assert not dropout
        assert causal
        assert not debug
        scores, _, v = self._attend(q, k, v, scale)
        return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)

    def _scaled_dot_product_cudnn_attention_backward(self, do, q, k, v, o, lse, *rest, scale):
        _seed, _offset, _bias, _cu_q, _cu_k, max_q, max_k, _dropout, _causal = rest
        assert lse.is_contiguous()
        assert lse.shape == (*q.shape[:3], 1)
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        groups = k.shape[1]
        scores, k, v = self._attend(q, k, v, scale)
        p = (scores - lse).exp()
        ds = p * (do @ v.transpose(-1, -2) - (do * o).sum(-1, keepdim=True)) * scale
        dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ do
        return ds @ k, *(x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))


def _failures(case: Case, dtype: torch.dtype, device: str = "cpu") -> dict[str, str]:
    plan = resolve(case.config, device=device, dtype=dtype, backends="sdpa", needs_grad=True)
    data = case.data(dtype, device=device)
    inputs = {"q": data.q, "k_cmp": data.k_cmp, "v_cmp": data.v_cmp}
    run = run_kernel(plan.cmp, inputs, data.do, data)
    verdicts = judge_slot(
        "cmp", run.inputs, run.outputs, case.config.geometry, case.config.softmax_scale, do=run.do
    )
    return {name: verdict.why for name, verdict in verdicts.items() if not verdict}


@pytest.mark.parametrize("tokens", [8, 9, 11, 12, 13, 61, 70])  # 8 = l: one row of one residue
def test_cmp_with_fake_cudnn_matches_the_oracle(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCudnn()
    monkeypatch.setattr(cudnn, "_ops", fake)
    monkeypatch.setattr(cudnn, "supports_call", lambda *call: True)
    assert _failures(Case("dense", CONFIG, (tokens,), batch=2), torch.float64) == {}
    assert len(fake.calls) in (4, 8), "expected one or two calls per sequence and direction"


def test_every_operand_of_cudnn_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 24 bf16 numbers at odd addresses."""
    operands: list[torch.Tensor] = []

    class Operators:
        def _scaled_dot_product_cudnn_attention(self, q, k, v, *options, scale):
            operands.extend((q, k, v))
            return q.new_empty(q.shape), q.new_empty((*q.shape[:-1], 1), dtype=torch.float32)

        def _scaled_dot_product_cudnn_attention_backward(self, do, q, k, v, o, *rest, scale):
            operands.extend((do, q, k, v, o))
            return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def rows(*shape: int) -> torch.Tensor:
        flat = torch.empty(math.prod(shape) + 1, dtype=torch.bfloat16, device="meta")
        return flat[1:].view(shape)

    monkeypatch.setattr(cudnn, "_ops", Operators())
    call = SlotCall(CONFIG.geometry, 0.5, None, 61)
    blocks = CONFIG.geometry.num_compressed(61)
    q, k, v = rows(2, 61, 4, 24), rows(2, blocks, 2, 24), rows(2, blocks, 2, 24)
    do, o, lse = rows(2, 61, 4, 24), rows(2, 61, 4, 24), torch.empty(2, 4, 61, device="meta")
    cudnn.forward(q, k, v, o, lse, call)
    cudnn.backward([do, q, k, v, o, lse], [torch.empty_like(x) for x in (q, k, v)], call)
    assert operands
    assert not any(2 * x.storage_offset() % 16 for x in operands)


def test_supports_checks_every_condition() -> None:
    supported = {
        "dtype": torch.bfloat16,
        "device_type": "cuda",
        "capability": (9, 0),
        "widths": (128, 128),
        "tokens": 8192,
        "sequences": 1,
        "scale": 0.1,
        "deterministic": False,
    }
    available = types.SimpleNamespace(is_available=lambda: True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends, "cudnn", available)
        assert cudnn.supports(**supported)
        assert cudnn.supports(**supported | {"widths": (192, 128)})
        for change in (
            {"dtype": torch.float32},
            {"device_type": "cpu"},
            {"capability": None},
            {"capability": (8, 0)},
            {"widths": (192, 192)},
            {"widths": (128, 65)},
            {"tokens": 1023},
            {"sequences": 9},
            {"scale": -0.1},
            {"deterministic": True},
        ):
            assert not cudnn.supports(**supported | change), change


@pytest.mark.parametrize(
    ("changes", "rank"),
    [
        ({}, 25),
        ({"seq_len": None, "batch": None}, 25),
        ({"slot": "win"}, 0),
        ({"varlen": True}, 0),
        ({"capability": (8, 0)}, 0),
        ({"seq_len": 512}, 0),
        ({"deterministic": True}, 0),
        ({"seq_len": 65536}, 40),
        ({"seq_len": 65536, "head_dim": 64, "v_head_dim": 64}, 25),
        ({"seq_len": 65536, "needs_grad": True}, 25),
        ({"seq_len": 65536, "needs_grad": True, "dtype": "float16"}, 40),
    ],
)
def test_rank_of_cmp_is_higher_on_cudnn(
    changes: dict[str, object], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends, "cudnn", types.SimpleNamespace(is_available=lambda: True))
    sizes = {"n_heads": 4, "head_dim": 128, "v_head_dim": 128, "geometry": CONFIG.geometry}
    request = make_request("cmp", 8192, **sizes, needs_grad=False)
    assert probe.rank(dataclasses.replace(request, **changes)) == rank


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [(128, 128), (64, 64), (192, 128), (80, 72)])
@pytest.mark.parametrize("tokens", [1025, 1040])
def test_cmp_on_cudnn_matches_the_oracle(
    tokens: int, widths: tuple[int, int], dtype: torch.dtype
) -> None:
    config = dataclasses.replace(
        CONFIG,
        head_dim=widths[0],
        v_head_dim=widths[1],
        compress_block_size=32,
        compress_stride=16,
        select_block_size=64,
    )
    assert cudnn.supports(
        dtype, "cuda", torch.cuda.get_device_capability(), widths, tokens, 1, 0.1, False
    ) == (torch.cuda.get_device_capability() >= cudnn.MIN_CAPABILITY)
    assert _failures(Case("dense", config, (tokens,)), dtype, "cuda") == {}
