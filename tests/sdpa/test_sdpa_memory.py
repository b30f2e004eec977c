"""Peak memory of a slot, from a dry run, held against real runs on the CPU and, for CUDA's routes,
against the whole loops that the dry run shortens.

What libraries allocate on CUDA is measured in tests/gpu; here their sizes are sums by hand.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from nsa_backend_sdpa import aten, device, engine, select, tiles, win, workspace
from nsa_core import BlockGeometry, NSAConfig, Request, resolve
from nsa_core.contract import SLOTS, SlotCall
from nsa_core.dryrun import PeakBytes, slot_inputs

LENGTHS = [2048 << i for i in range(6)]


@pytest.fixture(autouse=True)
def _cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    workspace.peak.cache_clear()


def make_request(slot: str, seq_len: int, **fields: Any) -> Request:
    given = {
        "n_heads": 12,
        "n_kv_heads": 2,
        "head_dim": 64,
        "v_head_dim": 64,
        "dtype": "bfloat16",
        "batch": 1,
    }
    given |= {
        "geometry": BlockGeometry(),
        "needs_grad": True,
        "device": "cuda",
        "capability": (9, 0),
    }
    return Request(slot=slot, seq_len=seq_len, **{**given, **fields})


def whole(total: int, size: int, document: int = 0) -> Iterator[slice]:
    """device.pieces outside a dry run."""
    return (slice(a, min(a + size, total)) for a in range(0, total, size))


def counted(request: Request, count: PeakBytes, tensors: list[Any], call: SlotCall) -> int:
    """Peak bytes of forward and backward; the last of ``tensors`` is do."""
    module = importlib.import_module(f"nsa_backend_sdpa.{request.slot}")
    *inputs, do = tensors
    with count:
        out = module.forward(*inputs, call=call)
        saved = out if request.slot in ("cmp", "sel", "win") else ()
        if request.needs_grad and request.slot != "select":
            gradients = module.backward(do, *inputs, *saved, call=call)
            del gradients
    return count.peak


SHAPES = {
    "reports": {},
    "fp32": {"dtype": "float32"},
    "fp64": {"dtype": "float64", "seq_len": 2000},
    "forward": {"needs_grad": False},
    "h=1": {"n_heads": 4, "n_kv_heads": 4},
    "h=16 wide": {"n_heads": 32, "head_dim": 192, "v_head_dim": 128, "seq_len": 2048},
    "batch": {"batch": 3, "seq_len": 5000},
    "w>=S": {"geometry": BlockGeometry(window_size=6000), "dtype": "float32", "seq_len": 3000},
    "w>4096": {"geometry": BlockGeometry(window_size=6000), "seq_len": 9000},
    "deterministic": {"deterministic": True},
    "short": {"seq_len": 2048},
    "few heads": {"seq_len": 2048, "n_heads": 2},
    "several steps": {"seq_len": 16384, "needs_grad": False},
    "packed": {"seq_len": 8192, "varlen": True, "batch": 3},
    "sm_80": {"capability": (8, 0)},
}
BOUNDARIES = [0, 8000, 8150, 8192]  # the bound of packed cmp is of one document of all tokens
EACH = pytest.mark.parametrize(
    ("slot", "shape"),
    [(slot, s) for slot in SLOTS for s in SHAPES if slot == "win" or not s.startswith("w>")],
)


@EACH
def test_a_dry_run_of_shortened_loops_is_one_of_whole_loops(
    slot: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = dict(SHAPES[shape])
    request = make_request(slot, fields.pop("seq_len", 5000), **fields)
    stated = getattr(workspace, slot)(request)
    for module in (aten, select, importlib.import_module("nsa_backend_sdpa.sel"), tiles, win):
        monkeypatch.setattr(module.device if module is aten else module, "pieces", whole)
    do, tensors, call = slot_inputs(request)
    if request.varlen and slot == "cmp":
        cu_seqlens = torch.tensor(BOUNDARIES, dtype=torch.int32)
        call = dataclasses.replace(call, cu_seqlens=cu_seqlens)
    with device.described("cuda", request.capability):
        real = counted(request, workspace._WithLibraries(), [*tensors, do], call)
    assert stated == (pytest.approx(real, rel=0.025) if request.varlen else real)


ON_THE_CPU = {
    "reports": {},
    "fp32": {"dtype": "float32"},
    "forward": {"needs_grad": False},
    "h=1 wide": {"n_kv_heads": 4, "head_dim": 80, "v_head_dim": 48},
    "batch": {"batch": 3, "seq_len": 150},
    "w>=S": {"geometry": BlockGeometry(window_size=1000)},
    "packed": {"varlen": True, "batch": 3},
}


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("shape", ON_THE_CPU)
def test_row_47_workspace_is_what_is_allocated(
    shape: str, slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on data, with every iteration of every loop; small tiles make many of them."""
    monkeypatch.setitem(engine.SCORE_BYTES, "cpu", 2**19)
    fields = {"seq_len": 300, "n_heads": 4, **ON_THE_CPU[shape]}
    request = make_request(slot, device="cpu", capability=None, **fields)
    stated = getattr(workspace, slot)(request)
    do, tensors, call = slot_inputs(request)
    tensors = [torch.zeros(x.shape, dtype=x.dtype) for x in (*tensors, do)]
    if request.varlen:
        bounds = torch.tensor([0, 250, 265, 300], dtype=torch.int32)
        call = dataclasses.replace(call, cu_seqlens=bounds)
    real = counted(request, PeakBytes(*tensors), tensors, call)
    close = 0.2 if request.varlen and slot == "cmp" else 0.01  # cmp: a bound
    assert stated == pytest.approx(real, rel=close)


@pytest.mark.parametrize("slot", SLOTS)
def test_a_dry_run_allocates_nothing_and_is_remembered(slot: str) -> None:
    class Bytes(TorchDispatchMode):
        real = 0

        def __torch_dispatch__(
            self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for x in tree_iter(out):
                if isinstance(x, torch.Tensor) and x.device.type != "meta":
                    self.real += x.nbytes
            return out

    with Bytes() as made:
        stated = getattr(workspace, slot)(make_request(slot, 65536))
        packed = getattr(workspace, slot)(make_request(slot, 65536, varlen=True, batch=9))
    assert min(stated, packed) > 2**20
    assert made.real < 2**10, "boundaries, and nothing else"
    before = workspace.peak.cache_info().hits
    assert getattr(workspace, slot)(make_request(slot, 65536)) == stated
    assert workspace.peak.cache_info().hits == before + 1


@pytest.mark.parametrize("slot", SLOTS)
def test_memory_grows_at_most_as_s_to_the_1_1(slot: str) -> None:
    points = [
        (math.log(s), math.log(getattr(workspace, slot)(make_request(slot, s)))) for s in LENGTHS
    ]
    mean_x, mean_y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )
    assert slope <= 1.1, slope


def test_cudnn_holds_gradients_of_every_head_that_shares_keys() -> None:
    """dq and delta in fp32; with h > 1, dk and dv of each query head before they are summed."""
    operator = "_scaled_dot_product_cudnn_attention_backward"

    def empty(heads: int, width: int) -> torch.Tensor:
        return torch.empty(16, heads, 127, width, dtype=torch.bfloat16, device="meta")

    rows = 16 * 12 * 127
    alone = workspace.library_bytes(
        operator, [empty(12, 128), empty(12, 64), empty(12, 64), empty(12, 128)]
    )
    assert alone == rows * (64 * 4 + 4)
    shared = workspace.library_bytes(
        operator, [empty(12, 128), empty(12, 64), empty(2, 64), empty(2, 128)]
    )
    assert shared == alone + rows * (64 + 128) * 2


def test_flash_attention_holds_dq_in_fp32() -> None:
    """In whole tiles of 128 rows, and columns of the kernel that serves the width; and delta."""
    q = torch.empty(2, 96, 511, 80, dtype=torch.bfloat16, device="meta")
    operator = "_scaled_dot_product_flash_attention_backward"
    assert workspace.library_bytes(operator, [q, q]) == 2 * 96 * 512 * (96 + 1) * 4
    for request in (make_request("cmp", 5000), make_request("cmp", 5000, capability=(8, 0))):
        do, tensors, call = slot_inputs(request)
        with device.described("cuda", request.capability):
            without = counted(request, PeakBytes(), [*tensors, do], call)
        assert workspace.cmp(request) > 1.1 * without, "the libraries' buffers are counted"


def test_requests_of_nothing() -> None:
    for slot in SLOTS:
        assert getattr(workspace, slot)(make_request(slot, 0)) == 0
    outputs = 31 * 12 * (64 * 2 + 4)
    short = workspace.cmp(make_request("cmp", 31, needs_grad=False))
    assert short == pytest.approx(outputs, rel=0.05)  # no compressed token, and no call


def test_packed_calls_are_bounded_too() -> None:
    for slot in SLOTS:
        one = getattr(workspace, slot)(make_request(slot, 8192))
        packed = getattr(workspace, slot)(make_request(slot, 8192, varlen=True, batch=8))
        assert 0 < packed < 2 * one


def test_backward_fills_no_gradient_of_lse() -> None:
    plan = resolve(
        NSAConfig(dim=32, n_heads=4, n_kv_heads=2, head_dim=8), dtype=torch.float32, needs_grad=True
    )
    q, k, v = (torch.randn(1, 40, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    o, lse = plan.win(q, k, v)
    filled = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if "zero" in str(func):
                filled.append(out.shape)
            return out

    with Watch():
        torch.autograd.grad(o, q, torch.ones_like(o))
    assert lse.shape not in filled
