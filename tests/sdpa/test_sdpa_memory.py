"""Workspaces from dry runs, compared with real runs on the CPU and with dry runs of complete loops.

The complete loops cover the implementations for CUDA. tests/gpu measures the buffers that libraries
allocate on CUDA; the tests below compare their sizes with sums computed by hand.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from nsa_backend_sdpa import aten, device, engine, select, tiles, win, workspace
from nsa_core import BlockGeometry, NSAConfig, Request, resolve
from nsa_core.contract import SLOTS, SlotCall
from nsa_core.dryrun import PeakBytes, slot_inputs
from slot_requests import make_request

LENGTHS = [2048 << i for i in range(6)]


@pytest.fixture(autouse=True)
def _cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    workspace.peak.cache_clear()


def all_chunks(total: int, size: int, document: int = 0) -> Iterator[slice]:
    """Yield every slice, like device.chunks outside a dry run."""
    return (slice(a, min(a + size, total)) for a in range(0, total, size))


def measured_peak(request: Request, count: PeakBytes, tensors: list[Any], call: SlotCall) -> int:
    """Return the peak bytes of forward and backward; the last of ``tensors`` is do."""
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
# One long document, because the workspace of packed cmp is that of one document with all tokens.
BOUNDARIES = [0, 8000, 8150, 8192]
EACH = pytest.mark.parametrize(
    ("slot", "shape"),
    [(slot, s) for slot in SLOTS for s in SHAPES if slot == "win" or not s.startswith("w>")],
)


# The default run takes every third shape, the slow run all of them.
SAMPLED = pytest.mark.parametrize(
    ("slot", "shape"),
    [
        (slot, s) if i % 3 == 0 else pytest.param(slot, s, marks=pytest.mark.slow)
        for slot in SLOTS
        for i, s in enumerate(SHAPES)
        if slot == "win" or not s.startswith("w>")
    ],
)


@pytest.mark.few_cases(
    "cmp-reports",
    "cmp-deterministic",
    "cmp-several steps",
    "select-forward",
    "win-forward",
    "combine-batch",
)
@SAMPLED
def test_shortened_loops_of_a_dry_run_reach_the_peak_of_complete_loops(
    slot: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = dict(SHAPES[shape])
    request = make_request(slot, fields.pop("seq_len", 5000), **fields)
    stated = getattr(workspace, slot)(request)
    for module in (aten, select, importlib.import_module("nsa_backend_sdpa.sel"), tiles, win):
        monkeypatch.setattr(module.device if module is aten else module, "chunks", all_chunks)
    do, tensors, call = slot_inputs(request)
    if request.varlen and slot == "cmp":
        cu_seqlens = torch.tensor(BOUNDARIES, dtype=torch.int32)
        call = dataclasses.replace(call, cu_seqlens=cu_seqlens)
    with device.simulated("cuda", request.capability):
        complete = measured_peak(request, workspace._WithLibraries(), [*tensors, do], call)
    assert stated == (pytest.approx(complete, rel=0.025) if request.varlen else complete)


@pytest.mark.slow
def test_dry_run_of_select_includes_its_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 MiB of scores, select takes 60 steps, and its largest steps cross two documents.

    A step within one document scores only the blocks up to its own end. A dry run that leaves out
    the start of the last document therefore misses the peak.
    """
    monkeypatch.setitem(engine.SCORE_BYTES, "cuda", 4 * 2**20)
    request = make_request("select", 5000, batch=3)
    shortened = device.chunks

    def workspace_with(chunks: Callable[..., Iterator[slice]]) -> int:
        for module in (select, tiles):
            monkeypatch.setattr(module, "chunks", chunks)
        workspace.peak.cache_clear()
        return workspace.select(request)

    stated = workspace_with(shortened)
    assert stated == workspace_with(all_chunks)
    assert stated > workspace_with(lambda total, size, document=0: shortened(total, size))
    assert stated < workspace_with(lambda total, size, document=0: iter([slice(0, total)]))


ON_THE_CPU = {
    "reports": {},
    "fp32": {"dtype": "float32"},
    "forward": {"needs_grad": False},
    "h=1 wide": {"n_kv_heads": 4, "head_dim": 80, "v_head_dim": 48},
    "batch": {"batch": 3, "seq_len": 150},
    "w>=S": {"geometry": BlockGeometry(window_size=1000)},
    "packed": {"varlen": True, "batch": 3},
}


@pytest.mark.few_cases(
    "reports-cmp",
    "fp32-select",
    "forward-win",
    "h=1 wide-combine",
    "batch-cmp",
    "w>=S-cmp",
    "packed-cmp",
)
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("shape", ON_THE_CPU)
def test_row_47_workspace_equals_the_peak_of_a_real_run(
    shape: str, slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real run uses tensors with data and complete loops. Small tiles give many iterations."""
    monkeypatch.setitem(engine.SCORE_BYTES, "cpu", 2**19)
    fields = {"seq_len": 300, "n_heads": 4, **ON_THE_CPU[shape]}
    request = make_request(slot, device="cpu", capability=None, **fields)
    stated = getattr(workspace, slot)(request)
    do, tensors, call = slot_inputs(request)
    tensors = [torch.zeros(x.shape, dtype=x.dtype) for x in (*tensors, do)]
    if request.varlen:
        bounds = torch.tensor([0, 250, 265, 300], dtype=torch.int32)
        call = dataclasses.replace(call, cu_seqlens=bounds)
    real = measured_peak(request, PeakBytes(*tensors), tensors, call)
    tolerance = 0.2 if request.varlen and slot == "cmp" else 0.01  # packed cmp: an upper bound
    assert stated == pytest.approx(real, rel=tolerance)


@pytest.mark.few_cases("cmp", "combine")
@pytest.mark.parametrize("slot", SLOTS)
def test_dry_run_allocates_no_memory_and_is_cached(slot: str) -> None:
    class AllocatedBytes(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(
            self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for x in tree_iter(out):
                if isinstance(x, torch.Tensor) and x.device.type != "meta":
                    self.total += x.nbytes
            return out

    with AllocatedBytes() as allocated:
        stated = getattr(workspace, slot)(make_request(slot, 65536))
        packed = getattr(workspace, slot)(make_request(slot, 65536, varlen=True, batch=9))
    assert min(stated, packed) > 2**20
    assert allocated.total < 2**10, "only boundaries may be allocated"
    hits = workspace.peak.cache_info().hits
    assert getattr(workspace, slot)(make_request(slot, 65536)) == stated
    assert workspace.peak.cache_info().hits == hits + 1


@pytest.mark.few_cases("cmp", "combine")
@pytest.mark.parametrize("slot", SLOTS)
def test_workspace_grows_at_most_as_seq_len_to_the_power_1_1(slot: str) -> None:
    points = [
        (math.log(s), math.log(getattr(workspace, slot)(make_request(slot, s)))) for s in LENGTHS
    ]
    mean_x, mean_y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )
    assert slope <= 1.1, slope


def test_cudnn_backward_holds_key_gradients_of_every_query_head() -> None:
    """It holds dq and delta in fp32, and with h > 1 also dk and dv of each query head."""
    operator = "_scaled_dot_product_cudnn_attention_backward"

    def empty(heads: int, width: int) -> torch.Tensor:
        return torch.empty(16, heads, 127, width, dtype=torch.bfloat16, device="meta")

    rows = 16 * 12 * 127
    own_keys = workspace.library_bytes(
        operator, [empty(12, 128), empty(12, 64), empty(12, 64), empty(12, 128)]
    )
    assert own_keys == rows * (64 * 4 + 4)
    shared_keys = workspace.library_bytes(
        operator, [empty(12, 128), empty(12, 64), empty(2, 64), empty(2, 128)]
    )
    assert shared_keys == own_keys + rows * (64 + 128) * 2


def test_flash_attention_backward_holds_dq_and_delta_in_fp32() -> None:
    """Both are padded to tiles of 128 rows, and dq to the width of the kernel that runs."""
    q = torch.empty(2, 96, 511, 80, dtype=torch.bfloat16, device="meta")
    operator = "_scaled_dot_product_flash_attention_backward"
    assert workspace.library_bytes(operator, [q, q]) == 2 * 96 * 512 * (96 + 1) * 4
    for request in (make_request("cmp", 5000), make_request("cmp", 5000, capability=(8, 0))):
        do, tensors, call = slot_inputs(request)
        with device.simulated("cuda", request.capability):
            without_libraries = measured_peak(request, PeakBytes(), [*tensors, do], call)
        assert workspace.cmp(request) > 1.1 * without_libraries, "library buffers are not counted"


def test_workspace_without_tokens_or_compressed_tokens() -> None:
    for slot in SLOTS:
        assert getattr(workspace, slot)(make_request(slot, 0)) == 0
    outputs = 31 * 12 * (64 * 2 + 4)
    no_compressed_token = workspace.cmp(make_request("cmp", 31, needs_grad=False))
    assert no_compressed_token == pytest.approx(outputs, rel=0.05)  # the backend is not called


@pytest.mark.slow
def test_packed_workspace_is_less_than_twice_the_dense_one() -> None:
    for slot in SLOTS:
        dense = getattr(workspace, slot)(make_request(slot, 8192))
        packed = getattr(workspace, slot)(make_request(slot, 8192, varlen=True, batch=8))
        assert 0 < packed < 2 * dense


def test_backward_does_not_materialize_a_gradient_of_lse() -> None:
    plan = resolve(
        NSAConfig(dim=32, n_heads=4, n_kv_heads=2, head_dim=8), dtype=torch.float32, needs_grad=True
    )
    q, k, v = (torch.randn(1, 40, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    o, lse = plan.win(q, k, v)
    zero_filled = []

    class RecordZeros(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if "zero" in str(func):
                zero_filled.append(out.shape)
            return out

    with RecordZeros():
        torch.autograd.grad(o, q, torch.ones_like(o))
    assert lse.shape not in zero_filled
