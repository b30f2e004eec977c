"""Queries that begin inside a sequence (contract 1.1) on sdpa: the rows of the whole call.

A piece is given as rows [first, end) of q. The oracle computes the whole sequence, with an output
gradient that is zero outside the piece.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random

import pytest
import torch

from nsa_backend_sdpa import aten, cmp, cudnn, engine, probe, sel, select, win
from nsa_backend_sdpa.device import simulated
from nsa_core import NSAConfig, resolve
from nsa_core.contract import SlotCall
from nsa_core.dryrun import PeakBytes
from nsa_core.errors import NSAError
from nsa_core.plan.registry import default_registry
from nsa_core.torch_ops.kernel import Kernel
from nsa_core.torch_ops.slot_op import slot_op
from nsa_verify import oracle
from nsa_verify.drawn.judge import judge
from nsa_verify.drawn.parser import parse
from nsa_verify.problems.cases import Case, config_of
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.slot_runs import run_kernel
from slot_requests import make_request

SLOTS = ("cmp", "select", "sel", "win")
CONFIG = config_of(4, 2, 8, 6, (8, 4, 16, 3, 12), rope=False)
SIZES = {"l": 8, "d": 4, "block": 16, "n": 3, "init": 1, "local": 2, "w": 12}
SIZES |= {"h": 2, "groups": 2, "dk": 8, "dv": 6}
DENSE = Case("dense", CONFIG, (60,), batch=2)
# Documents at rows 0, 3, 3, 45, 45, 46, 66; the last one is empty.
PACKED = Case("packed", CONFIG, (3, 0, 42, 0, 1, 20, 0), packed=True)
CASES = pytest.mark.parametrize("case", [DENSE, PACKED], ids=["dense", "packed"])


@functools.cache
def plan_of(case: Case, dtype: torch.dtype):
    return resolve(
        case.config,
        device="cpu",
        dtype=dtype,
        backends="sdpa",
        partial=True,
        needs_grad=True,
        varlen=case.packed,
    )


@functools.cache
def inputs_of(case: Case, dtype: torch.dtype) -> dict[str, dict[str, torch.Tensor]]:
    """Return the inputs of each slot for the whole sequences, and {"do": ..} under "do"."""
    data, geometry, scale = case.data(dtype), case.config.geometry, case.config.softmax_scale
    truth = oracle.cmp(data.q, data.k_cmp, data.v_cmp, geometry, scale, cu_seqlens=data.cu_seqlens)
    lse = truth.lse.to(torch.float64 if dtype == torch.float64 else torch.float32)
    arguments = (data.q, data.k_cmp, lse, geometry, scale)
    blocks = oracle.select(*arguments, cu_seqlens=data.cu_seqlens)
    return {
        "cmp": {"q": data.q, "k_cmp": data.k_cmp, "v_cmp": data.v_cmp},
        "select": {"q": data.q, "k_cmp": data.k_cmp, "lse": lse},
        "sel": {"q": data.q, "k": data.k_sel, "v": data.v_sel, "blocks": blocks},
        "win": {"q": data.q, "k": data.k_win, "v": data.v_win},
        "do": {"do": data.do},
    }


def rows_of(name: str, x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return ``rows`` of a tensor that has the rows of q."""
    return x[..., rows] if name == "lse" else x[..., rows, :, :]


def run_piece(
    case: Case, slot: str, dtype: torch.dtype, first: int, end: int
) -> dict[str, torch.Tensor]:
    """Run ``slot`` for rows first .. end - 1, and return its results and gradients."""
    rows = slice(first, end)
    tensors = {
        name: x if name[0] in "kv" else rows_of(name, x, rows)
        for name, x in inputs_of(case, dtype)[slot].items()
    }
    kernel: Kernel = getattr(plan_of(case, dtype), slot)
    do = None if slot == "select" else rows_of("do", inputs_of(case, dtype)["do"]["do"], rows)
    return run_kernel(kernel, tensors, do, case.data(dtype), first).outputs


def check(slot: str, case: Case, first: int, end: int, **fields: object) -> None:
    """Judge the rows first .. end - 1 of the queries of a whole call as a line of a drawn case.

    ``fields`` replace those of the line: tokens, for keys up to one token; sizes; the dtype.
    """
    words: dict[str, object] = {"dtype": "float64", **SIZES, "tokens": case.tokens}
    if case.packed:
        del words["tokens"]
        words["documents"] = ",".join(map(str, case.lengths))
    else:
        words["batch"] = case.batch
    words |= {"first_query": first, "queries": end - first, **fields}
    line = " ".join([slot, *(f"{name}={value}" for name, value in words.items())])
    findings = judge(Combination({slot: "sdpa"}), parse(line))
    assert findings
    wrong = [finding for finding in findings if finding.ok is not True]
    assert not wrong, (line, wrong)


def random_cuts(total: int, count: int, seed: int) -> list[tuple[int, int]]:
    """Return ``count`` pieces (first, end), among them pieces of one row."""
    generator = random.Random(seed)
    firsts = [generator.randrange(total) for _ in range(count)]
    lengths = [generator.choice([1, 2, 7, 17, total]) for _ in range(count)]
    return [(first, min(total, first + length)) for first, length in zip(firsts, lengths)]


def edge_cuts() -> list[tuple[int, int]]:
    """Return the pieces of PACKED between rows at, before and after the ends of documents."""
    edges = sorted({b + i for b in (0, 3, 45, 46, 66) for i in (-1, 0, 1)} & {*range(67)})
    return list(itertools.combinations(edges, 2))


@pytest.mark.few_cases
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("first", range(16))
def test_every_residue_of_the_first_query(slot: str, first: int) -> None:
    """16 is l', a multiple of d; also rows that see no compressed token, and cut keys."""
    check(slot, DENSE, first, first + 3)
    check(slot, DENSE, 16 + first, 16 + first + 5, tokens=16 + first + 5)


@pytest.mark.few_cases
@CASES
@pytest.mark.parametrize("slot", SLOTS)
def test_random_cuts(slot: str, case: Case) -> None:
    for first, end in [(0, case.tokens), *random_cuts(case.tokens, 6, seed=1)]:
        check(slot, case, first, end)


@pytest.mark.parametrize("slot", SLOTS)
def test_cuts_at_documents(slot: str) -> None:
    for first, end in random.Random(2).sample(edge_cuts(), 12):
        check(slot, PACKED, first, end)


def test_window_of_one_key() -> None:
    """Without earlier keys, the rows of queries and keys are the same."""
    for first, end in ((1, 50), (40, 45)):
        check("win", PACKED, first, end, w=1)


@pytest.mark.slow
@pytest.mark.parametrize("slot", SLOTS)
def test_all_cuts_at_documents(slot: str) -> None:
    for first, end in edge_cuts():
        check(slot, PACKED, first, end)


@pytest.mark.few_cases
@CASES
@pytest.mark.parametrize(
    "words",
    ["", "w=1", "w=99", "l=4", "d=1", "groups=4 h=1 dv=24", "scale=-0.3", "n=9"],
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_other_sizes_and_dtypes_are_judged(case: Case, words: str, dtype: str) -> None:
    for slot in SLOTS:
        check(slot, case, 19, 52, dtype=dtype, **dict(word.split("=") for word in words.split()))


def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps, tiles, key chunks and query chunks, and the tiles of cmp as on CUDA."""
    monkeypatch.setitem(engine.SCORE_BYTES, "cpu", 2_000)
    monkeypatch.setattr(engine, "MAX_KEYS", 7)
    monkeypatch.setattr(aten, "route", lambda *request: "tiles")


@pytest.mark.few_cases
@CASES
@pytest.mark.parametrize("slot", SLOTS)
def test_random_cuts_in_small_tiles(slot: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_tiles(monkeypatch)
    for first, end in random_cuts(case.tokens, 3, seed=4):
        check(slot, case, first, end)


@CASES
@pytest.mark.parametrize("slot", SLOTS)
def test_whole_sequences_give_the_same_bits(slot: str, case: Case) -> None:
    """A partial plan runs a whole call as other plans do, with and without first_query=0."""
    tensors, data = list(inputs_of(case, torch.float32)[slot].values()), case.data(torch.float32)
    plan = resolve(
        case.config, device="cpu", dtype=torch.float32, backends="sdpa", varlen=case.packed
    )
    results = [
        kernel(*tensors, cu_seqlens=data.cu_seqlens, max_seqlen=data.max_seqlen, **first)
        for kernel, first in (
            (getattr(plan, slot), {}),
            (getattr(plan_of(case, torch.float32), slot), {}),
            (getattr(plan_of(case, torch.float32), slot), {"first_query": 0}),
        )
    ]
    for result in results[1:]:
        for actual, expected in zip(result, results[0]):
            assert torch.equal(actual, expected)


@CASES
@pytest.mark.parametrize("slot", SLOTS)
def test_nan_in_keys_after_the_last_query_reaches_nothing(slot: str, case: Case) -> None:
    """Keys of later tokens, and of later documents."""
    first, end, dtype = 20, 30, torch.float32
    clean = run_piece(case, slot, dtype, first, end)
    tensors = inputs_of(case, dtype)[slot]
    seen = end
    if slot in ("cmp", "select"):  # PACKED: rows 3 .. 29 of the document at row 3
        seen = CONFIG.geometry.num_compressed(end - (3 if case.packed else 0))
    saved = {name: tensors[name] for name in tensors if name[0] in "kv"}
    try:
        for name, x in saved.items():
            tensors[name] = x.clone()
            tensors[name][..., seen:, :, :] = torch.nan
        for name, x in run_piece(case, slot, dtype, first, end).items():
            assert torch.equal(x, clean[name]), name
    finally:
        tensors.update(saved)


@pytest.mark.few_cases("select-dense")
@pytest.mark.parametrize(
    "case", [DENSE, pytest.param(PACKED, marks=pytest.mark.slow)], ids=["dense", "packed"]
)
@pytest.mark.parametrize("slot", SLOTS)
def test_opcheck(slot: str, case: Case) -> None:
    tensors, data = inputs_of(case, torch.float32)[slot], case.data(torch.float32)
    arguments = [
        x if name[0] in "kv" else rows_of(name, x, slice(21, 47)) for name, x in tensors.items()
    ]
    leaves = [
        x.clone().requires_grad_(slot != "select") if name not in ("blocks", "lse") else x
        for name, x in zip(tensors, arguments)
    ]
    spec = default_registry().get("sdpa").spec
    assert spec is not None
    op = slot_op("sdpa", slot, spec.slots[slot]).op
    scale, geometry = case.config.softmax_scale, case.config.geometry.as_ints()
    torch.library.opcheck(op, (*leaves, data.cu_seqlens, case.tokens, scale, geometry, False, 21))


class FlashOnCPU:
    """FlashAttention-2's operators of PyTorch, on the operators for the CPU.

    A causal mask requires as many queries as keys: where it is aligned differs between operators.
    """

    def __getattr__(self, name: str):
        return getattr(torch.ops.aten, name)

    def _scaled_dot_product_flash_attention(self, q, k, v, dropout, causal, debug, *, scale):
        assert not causal or q.shape[2] == k.shape[2]
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return (*op(q, k, v, dropout, causal, scale=scale), None, None)

    def _scaled_dot_product_flash_attention_backward(self, *arguments, scale):
        do, q, k, v, o, lse, _, _, queries, keys, dropout, causal, *_ = arguments
        assert (queries, keys) == (q.shape[2], k.shape[2])
        assert not causal or queries == keys
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return op(do, q, k, v, o, lse, dropout, causal, scale=scale)


@CASES
def test_random_cuts_of_cmp_through_flash_attention(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls of CUDA, with at most 3 entries a call."""
    monkeypatch.setattr(aten, "route", lambda *request: "flash")
    monkeypatch.setattr(aten, "_ops", FlashOnCPU())
    monkeypatch.setattr(aten.flash, "MAX_BATCH", 3)
    for first, end in random_cuts(case.tokens, 4, seed=5):
        check("cmp", case, first, end)


def test_cmp_inside_a_sequence_never_runs_on_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's calls are those of whole sequences."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("cuDNN was called")

    monkeypatch.setattr(cudnn, "supports_call", lambda *arguments: True)
    for direction in ("forward", "backward"):
        monkeypatch.setattr(cudnn, direction, refuse)
    check("cmp", DENSE, 20, 30)
    with pytest.raises(NSAError, match="cuDNN was called"):
        run_piece(DENSE, "cmp", torch.float64, 0, 30)


def meta_peak(slot: str, first: int, rows: int, device: str, deterministic: bool) -> int:
    """Return the peak bytes of forward and backward of ``rows`` queries from token ``first``."""
    geometry, end = NSAConfig(dim=512, n_heads=8, n_kv_heads=2, head_dim=64).geometry, first + rows
    call = SlotCall(geometry, 0.1, None, end, deterministic, first)
    keys = geometry.num_compressed(end) if slot in ("cmp", "select") else end

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k = tensor(1, rows, 8, 64), tensor(1, keys, 2, 64)
    others = {
        "select": [tensor(1, 8, rows, dtype=torch.float32)],
        "sel": [k, tensor(1, rows, 2, geometry.num_selected_blocks, dtype=torch.int32)],
    }.get(slot, [k])
    module = {"cmp": cmp, "sel": sel, "win": win, "select": select}[slot]
    with simulated(device, (9, 0) if device == "cuda" else None), PeakBytes() as count:
        results = module.forward(q, k, *others, call=call)
        if slot != "select":
            module.backward(q, q, k, *others, *results, call=call)
        del results
    return count.peak


@pytest.mark.few_cases("cmp-cpu", "sel-cuda", "win-cuda, deterministic")
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda, deterministic"])
@pytest.mark.parametrize("slot", SLOTS)
def test_memory_grows_linearly_with_the_keys(slot: str, device: str) -> None:
    device, _, flag = device.partition(", ")
    peaks = [meta_peak(slot, first, 256, device, bool(flag)) for first in (2**18, 2**19)]
    results = 2 * 2 * (2**19 + 256) * 2 * 64  # dk and dv of the longer sequence
    assert peaks[1] < 2.1 * peaks[0]
    if slot == "select" and device == "cpu":  # the probabilities of a tile
        assert peaks[1] < 3 * 64 * 4 * 4 * 2**19 // 16
    if slot == "win":  # nothing but the results grows
        assert peaks[1] - peaks[0] < 0.6 * results


@pytest.mark.parametrize("slot", SLOTS)
def test_probe_accepts_and_cmp_ranks_without_cudnn(
    slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    sizes = {"n_heads": 4, "geometry": CONFIG.geometry, "batch": None}
    request = make_request(slot, None, **sizes, needs_grad=False)
    assert probe.rank(request) == (probe.CUDNN_RANK if slot == "cmp" else 0)
    request = dataclasses.replace(request, partial=True)
    assert list(probe.probe(request)) == []
    assert probe.rank(request) == 0
