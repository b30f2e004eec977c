"""Host code of the triton backend without a GPU: which kernels it launches, and what it caches.

The tests count, so they do not depend on the machine. benchmarks/host_overhead.py measures times;
its driver that launches nothing serves here as well.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_core import NSAConfig, NSAttention, dryrun
from nsa_core.contract import Request
from slot_requests import make_request

pytest.importorskip("triton")
JITFunction = importlib.import_module("triton.runtime.jit").JITFunction
compile_table = importlib.import_module("compile_table")
device = importlib.import_module("nsa_backend_triton.host.device")
offline = importlib.import_module("offline")
launch_cache = importlib.import_module("nsa_backend_triton.host.launch_cache")
meta_inputs = importlib.import_module("nsa_backend_triton.meta_inputs")

# A tensor map is made from its address, swizzle, element size and type, block, shape, strides and
# padding.
TMA_ARGUMENTS = 8
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
# Kernels and PyTorch operators that launch something, forward and backward, at 8192 tokens. 12/2/64
# uses buckets and adds dk, dv and dq in no fixed order; 64/4/128 does neither.
LISTS = {"sel_mark_kernel": 1, "sel_counts_kernel": 1, "sel_places_kernel": 1, "cumsum": 1}
BUDGET: dict[tuple[str, str], tuple[dict[str, int], dict[str, int]]] = {
    ("cmp", "12/2/64"): ({"span_forward": 1}, {"span_dq": 1, "span_dkdv": 1, "sum_parts": 1}),
    ("cmp", "12/2/64, packed"): (
        {"span_starts": 1, "span_forward": 1},
        {"span_starts": 1, "span_dq": 1, "span_dkdv": 1, "sum_parts": 1},
    ),
    ("win", "12/2/64"): ({"span_forward": 1}, {"span_dq": 1, "span_dkdv": 1}),
    ("select", "12/2/64"): ({"select_forward": 1}, {}),
    ("combine", "12/2/64"): ({"combine_forward": 1}, {"combine_backward": 1}),
    ("sel", "64/4/128"): (
        {"sel_union_kernel": 1, "sel_forward_kernel": 1},
        {"attention_delta": 1, "new_zeros": 1, "sel_block_backward": 1}
        | {"sel_add_chunks": 2, "sel_union_kernel": 1, "sel_tile_backward": 1}
        | LISTS,
    ),
    ("sel", "12/2/64"): (
        {"sel_union_kernel": 1, "sel_forward_kernel": 1}
        | {"sel_bucket_kernel": 1, "sel_merge_kernel": 1, "new_zeros": 2}
        | LISTS,
        {"attention_delta": 1, "sel_block_backward": 1, "sel_round": 1}
        | {"sel_segments": 1, "new_zeros": 2}
        | LISTS,
    ),
}
FREE = {
    "new_empty",
    "empty",
    "empty_like",
    "slice",
    "unbind",
    "select",
    "view",
    "detach",
}  # launch nothing


class Launching(TorchDispatchMode):
    """Count the operators that run something on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in FREE:
            self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[dict[str, int], Any]:
    with offline.recording(90) as launches, Launching() as mode:
        out = function(*args, **kwargs)
    return dict(mode.seen + Counter(made.name for made in launches)), out


def request_of(slot: str, shape: str, tokens: int, **options: Any) -> Request:
    """Return a bf16 request of one sequence; ``shape`` is Hq/G/D."""
    n_heads, n_kv_heads, width = (int(n) for n in shape.split("/"))
    sizes = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": width, "v_head_dim": width}
    none = {"capability": None, "needs_grad": False}
    return make_request(slot, tokens, **{**sizes, **none, **options})


@pytest.mark.parametrize(("slot", "shape"), BUDGET, ids=lambda x: str(x))
def test_slots_launch_exactly_the_listed_kernels(slot: str, shape: str) -> None:
    forward, backward = BUDGET[slot, shape]
    shape, _, packed = shape.partition(", ")
    request = request_of(slot, shape, 8192, needs_grad=True, varlen=bool(packed))
    do, given, call = dryrun.slot_inputs(request)
    module = meta_inputs.slot_module(slot)
    seen, out = counted(module.forward, *given, call=call)
    assert seen == forward
    if backward:
        saved = [*given, *(() if slot == "combine" else out)]
        assert counted(module.backward, do, *saved, call=call)[0] == backward


def test_a_forward_of_too_many_pairs_is_refused_before_it_launches_anything() -> None:
    """At 12/2/64 the forward sorts the pairs that few tokens share, after its tiles."""
    _, given, call = dryrun.slot_inputs(request_of("sel", "12/2/64", 2**26))
    message = (
        "67108864 tokens with 2 lists of 16 blocks are 2147483648 pairs, at most 2147475456 are"
        r" supported: pass the queries in parts \(first_query\)"
    )
    with offline.recording(90) as launches, pytest.raises(ValueError, match=message):
        meta_inputs.slot_module("sel").forward(*given, call=call)
    assert not launches


def steps(
    bench: Any, packed: bool, tokens: int = 80, shape: tuple[int, int, int] = (12, 2, 64)
) -> dict[str, Any]:
    config = NSAConfig(
        dim=shape[0], n_heads=shape[0], n_kv_heads=shape[1], head_dim=shape[2], compress="mean"
    )
    return dict(bench.slot_steps(config, bench.make_plan(config, "triton", packed), tokens, packed))


def launch_arguments(kernels: list[Any]) -> list[list[Any]]:
    """The last arguments of each kernel; tensors, their addresses and tensor maps as one word."""

    def plain(kernel: Any, place: int, x: Any) -> Any:
        if place in kernel.tensors:
            assert isinstance(x, torch.Tensor) or x % 16 == 0
            return "tensor"
        is_map = isinstance(x, tuple) and len(x) == TMA_ARGUMENTS
        return ("map", *x[1:]) if is_map else x

    return [[plain(k, place, x) for place, x in enumerate(k.arguments)] for k in kernels]


@PACKED
@pytest.mark.parametrize("shape", [(12, 2, 64), (16, 1, 128)], ids=str)
def test_cached_launch_equals_the_launch_by_triton(
    shape: tuple[int, int, int], packed: bool, bench: Any, no_gpu: Any
) -> None:
    from triton.runtime.jit import JITFunction

    everything = steps(bench, packed, shape=shape)
    for step in everything.values():
        step()
    by_triton, counts = launch_arguments(no_gpu), [k.launches for k in no_gpu]
    assert by_triton
    with mock.patch.object(JITFunction, "run", side_effect=AssertionError("not cached")):
        for step in everything.values():
            step()
    assert [k.launches for k in no_gpu] == [2 * n for n in counts]
    # the kernel's own arguments, after those of the launcher
    assert [row[13:] for row in launch_arguments(no_gpu)] == [row[13:] for row in by_triton]
    # the grid
    assert [row[:3] for row in launch_arguments(no_gpu)] == [row[:3] for row in by_triton]


def test_other_metadata_or_alignment_goes_through_triton(bench: Any, no_gpu: Any) -> None:
    from triton.runtime.jit import JITFunction

    stock, asked = JITFunction.run, []

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(kernel.__name__)
        return stock(kernel, *args, **kwargs)

    for step in steps(bench, False).values():
        step()
    with mock.patch.object(JITFunction, "run", run):
        known = steps(bench, False)["combine.forward"]
        known()
        assert asked == []
        steps(bench, False, tokens=81)["combine.forward"]()
        assert asked == ["combine_forward"]
        o = torch.zeros(1, 80, 12, 64 + 8, dtype=torch.bfloat16)[..., :64]
        gates = torch.zeros(1, 80, 12, 3)
        plan = bench.make_plan(
            NSAConfig(dim=12, n_heads=12, n_kv_heads=2, head_dim=64), "triton", False
        )
        for _ in range(2):
            plan.combine(gates, o, o, o)
        assert asked == ["combine_forward"] * 2, "other strides, once"
        shifted = torch.zeros(80 * 12 * 64 + 1, dtype=torch.bfloat16)[1:].view(1, 80, 12, 64)
        for _ in range(2):
            plan.combine(gates, shifted, shifted, shifted)
        assert asked == ["combine_forward"] * 4, (
            "an unaligned tensor must not use the binary of aligned ones"
        )


def test_decode_steps_over_a_growing_cache_share_launches(
    no_gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.jit import JITFunction

    decode = importlib.import_module("nsa_backend_triton.decode.forms")
    monkeypatch.setattr("nsa_backend_triton.probe.probe", lambda request: ())
    monkeypatch.setattr(decode, "BOUND", 8)
    config = NSAConfig(dim=64, n_heads=4, n_kv_heads=2, head_dim=16)
    layer = NSAttention(config, backends="triton").bfloat16()
    cache, x = layer.new_cache(2, 24), torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    stock, asked = JITFunction.run, []

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append((kernel.__name__, int(cache.lengths[0])))
        return stock(kernel, *args, **kwargs)

    with torch.no_grad(), mock.patch.object(JITFunction, "run", run):
        for _ in range(3):
            layer(x, cache=cache)
        by_memory = launch_arguments(no_gpu)
        launch_cache.clear()
        cache.reset()
        for _ in range(3):
            layer(x, cache=cache)
            launch_cache.clear()
        by_triton = launch_arguments(no_gpu)
        assert [row[13:] for row in by_memory] == [row[13:] for row in by_triton]
        assert [row[:3] for row in by_memory] == [row[:3] for row in by_triton]
        del asked[:]
        for _ in range(24 - 3):
            layer(x, cache=cache)
    once = [("decode_gates", 4), ("decode_append", 4)]
    assert asked == [*once, ("decode_step", 4), ("decode_step", 9), ("decode_step", 17)]


def test_decode_steps_with_other_settings_are_launched_separately(no_gpu: list[Any]) -> None:
    """Benchmarks pass settings of their own."""
    decode, configs = (
        importlib.import_module(f"nsa_backend_triton.{name}")
        for name in ("decode.forms", "host.configs")
    )
    request = request_of("cmp", "4/2/64", 512, phase="decode")
    given, call = meta_inputs.step_inputs(request, 1, "cpu")
    traits = {"head_dim": 64, "v_head_dim": 64, "itemsize": 2, "heads": 2, "cmp_per_block": 4}
    span = configs.pick("decode_span", 90, **traits)
    for settings in (
        (None, None),
        ({**span, "PROGRAMS_PER_SM": 1}, None),
        ({**span, "PROGRAMS_PER_SM": 1}, None),
    ):
        decode.step(
            *(given[name] for name in meta_inputs.STEP_INPUTS["step"]), call=call, settings=settings
        )
    assert sum(kernel.launches for kernel in no_gpu) == 3


def test_each_no_gpu_block_starts_without_cached_launches(bench: Any) -> None:
    if device.interpreted():
        pytest.skip("the interpreter launches by itself")
    seen = []
    for _ in range(2):
        with bench.no_gpu() as kernels:
            steps(bench, False)["combine.forward"]()
            seen.append([k.launches for k in kernels])
    assert seen == [[1], [1]]


def keys_on_disk(passes: Sequence[str]) -> dict[str, str]:
    """Return kernel -> part of its key in Triton's cache, in a process that makes ``passes``."""
    for function in gc.get_objects():
        if isinstance(function, JITFunction):
            function.hash, function.used_global_vals = None, {}
    request, keys = make_request("cmp"), {}
    for name in passes:
        if name == "core":
            launches = compile_table.core_launches(request, 90)
        else:
            launches = compile_table.launches(dataclasses.replace(request, slot=name), 90)
        keys |= {launch.name: launch.kernel.cache_key for launch in launches}
    return keys


def test_the_key_of_a_kernel_on_disk_does_not_depend_on_the_kernels_before_it() -> None:
    """Otherwise a process that launches them in another order compiles them anew."""
    passes = ("cmp", "select", "sel", "win", "combine", "core")
    keys = keys_on_disk(passes)
    assert len(keys) > 10
    assert keys_on_disk(passes[::-1]) == keys


def test_number_of_cached_launches_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "uses_cache", lambda x: True)
    monkeypatch.setattr(launch_cache, "MAX_ENTRIES", 3)
    made: list[int] = []
    make = launch_cache.cached_by_metadata(lambda x, n: made.append(n) or n)
    x = torch.zeros(2)
    assert [make(x, n) for n in (1, 1, 2, 3, 3, 4, 4, 1)] == [1, 1, 2, 3, 3, 4, 4, 1]
    assert made == [1, 2, 3, 4, 1]


def test_cache_distinguishes_tensors_by_all_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_cache, "uses_cache", lambda x: True)
    describe = launch_cache.cached_by_metadata(lambda x, y: (y.shape, y.stride(), y.dtype))
    x = torch.zeros(4, 4)
    for y in (x, x.t()[:, :], x[:2], x.half(), x[:, ::2], torch.nn.Parameter(x[1:])):
        for _ in range(2):
            assert describe(x, y) == (y.shape, y.stride(), y.dtype)


@pytest.mark.parametrize(
    ("piece", "most"), [("nsa_attention.forward", 20), ("nsa_attention.both", 46)]
)
def test_operator_count_of_nsa_attention_around_its_slots(
    piece: str, most: int, bench: Any, no_gpu: Any
) -> None:
    """Mean compression, the sum of q's gradients and views take a few microseconds each."""
    config = NSAConfig(dim=12, n_heads=12, n_kv_heads=2, head_dim=64, compress="mean")
    pieces = dict(bench.whole_steps(config, bench.make_plan(config, "nothing", False), 64, False))
    row = bench.measure("nothing", piece, pieces[piece], no_gpu, 1)
    assert sum(row.ops.values()) <= most, row.ops


@pytest.mark.parametrize(
    ("piece", "kernels", "most"),
    [("long nsa_attention.forward", 11, 14), ("long nsa_attention.both", 24, 30)],
)
def test_a_long_call_takes_the_kernels_of_long_sequences(
    piece: str, kernels: int, most: int, bench: Any, no_gpu: Any
) -> None:
    """benchmarks/host_overhead.py runs them on few tokens: pairs are listed in both directions."""
    config = NSAConfig(dim=12, n_heads=12, n_kv_heads=2, head_dim=64, compress="mean")
    plan = bench.make_plan(config, "triton", False)
    with bench.no_arithmetic():
        for name, step in bench.long_steps(config, plan, 64, False):
            if name == piece:
                row = bench.measure("triton", piece, step, no_gpu, 1)
    assert row.launches == kernels
    assert sum(row.ops.values()) <= most, row.ops


def test_a_decode_step_of_the_layer_takes_three_kernels(bench: Any, no_gpu: Any) -> None:
    config = NSAConfig(dim=12, n_heads=12, n_kv_heads=2, head_dim=64, compress="mean")
    plan = bench.make_plan(config, "triton", False)
    with bench.no_arithmetic():
        ((name, step),) = bench.decode_steps(config, plan, 64, False)
        row = bench.measure("triton", name, step, no_gpu, 1)
    assert row.launches == 3
    assert sum(row.ops.values()) <= 24, row.ops


def test_operator_count_of_a_block_of_the_language_model(bench: Any, no_gpu: Any) -> None:
    """Under autocast with phi mlp: 308 on the CPU, where RMSNorm takes many operators.

    Before phi and rotary embedding became autograd nodes it took 465.
    """
    config = NSAConfig(dim=12, n_heads=12, n_kv_heads=2, head_dim=64)
    step = dict(bench.block_steps(config, bench.make_plan(config, "nothing", False), 64, False))[
        "Block.both"
    ]
    row = bench.measure("nothing", "Block.both", step, no_gpu, 1)
    assert sum(row.ops.values()) <= 310, row.ops
