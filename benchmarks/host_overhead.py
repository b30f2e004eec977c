"""Measure the host overhead of a call: CPU time, operators and launches per slot, without a GPU.

    python benchmarks/host_overhead.py [--shape 12/2/64] [--packed] [--only cmp.forward] [--profile]
    [--ops]

The slots run on CPU tensors. Backend ``nothing`` returns empty tensors, so only nsa_core remains.
Backend ``triton`` runs its host code for an sm_90, and each launch stops where Triton would call
the driver. The time includes the specialisation of arguments, the lookup of the binary, the Python
part of TMA descriptors and the hooks of launches, but not the C call. Lengths are short, and matrix
products and sorts return uninitialised tensors, so that PyTorch's operators take only their
dispatch time.

Besides the slots, the rows are nsa_attention and NSAttention, nsa_attention with the kernels of a
long sequence ("long"), a training block of the language model (Block), and a decode step of
NSAttention over a cache.

Columns: ``us`` is CPU time, the first decile of --repeats calls; ``launches`` counts Triton
kernels; ``ops`` counts PyTorch operators below autograd, outside of the slots.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import dataclasses
import functools
import itertools
import pstats
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from nsa_backend_triton.host import configs, device, launch_cache
from nsa_backend_triton.plugin import nsa_register_backends
from nsa_core import NSAConfig, NSAttention, nsa_attention
from nsa_core.contract import SLOTS, SlotCall, SlotSpec
from nsa_core.layer import attention
from nsa_core.plan.candidates import request_of
from nsa_core.plan.plan import Plan
from nsa_core.torch_ops.core_backward import core_backward
from nsa_core.torch_ops.kernel import Kernel
from nsa_core.torch_ops.schema import DIFFERENTIABLE, output_specs
from nsa_core.torch_ops.slot_op import slot_op
from nsa_models.lm.config import LMConfig
from nsa_models.lm.model import Block

ARCHITECTURE, MULTIPROCESSORS = 90, 132
BASE_ARGUMENTS = nvidia._BASE_ARGS_FORMAT_LEN  # of the C launcher, before those of the kernel
devices = itertools.count(99)  # device indices without cached kernels


@dataclasses.dataclass
class NoDriver:
    """A fake CUDA driver."""

    device: int

    class utils:  # noqa: N801  Triton's name
        fill_tma_descriptor = staticmethod(lambda *arguments: arguments)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCHITECTURE, 32)


class NoKernel(CompiledKernel):
    """A fake compiled kernel whose launch stops before the C launcher."""

    def __init__(self, signature: dict[str, str]) -> None:
        self.module = self.function = self.packed_metadata = self.hash = 0
        self.name, self.src = "nothing", None
        self.launches = 0
        self.tensors: list[int] = []  # positions of tensors among the arguments
        self.arguments: tuple[Any, ...] = ()
        descriptors = [kind for kind in signature.values() if str(kind).startswith("tensordesc")]
        fields = ("swizzle", "elem_size", "elem_type", "block_size")
        meta = [{**dict.fromkeys(fields, 0), "fp4_padded": False} for _ in descriptors]
        launcher = self._run = object.__new__(nvidia.CudaLauncher)
        launcher.num_ctas = 1
        launcher.global_scratch_size = launcher.profile_scratch_size = 0
        launcher.global_scratch_align = launcher.profile_scratch_align = 1
        launcher.launch_cooperative_grid = launcher.launch_pdl = False
        launcher.launch = nvidia.wrap_handle_tensordesc(self._launch, signature, meta)

    def _launch(self, *arguments: Any) -> None:
        """Do the Python of the C launcher: its hooks, and a method of every tensor."""
        metadata, *hooks = arguments[BASE_ARGUMENTS - 3 : BASE_ARGUMENTS]
        for hook in hooks:
            if hook is not None:
                hook(metadata)
        if not self.launches:  # by Triton; later launches may have addresses in these places
            self.tensors = [i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)]
        for i in self.tensors:
            if type(arguments[i]) is not int:
                arguments[i].data_ptr()
        self.launches += 1
        self.arguments = arguments


def _constant(value: Any, _: object) -> Any:
    return value


def _new(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(shape)


def _no_sort(x: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty(x.shape, dtype=torch.int64)


# Kernels of the CPU whose time depends on sizes and dtypes -> replacements that only allocate.
_NO_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "mm": lambda a, b: _new((a.shape[0], b.shape[1]), a),
    "addmm": lambda bias, a, b, **_: _new((a.shape[0], b.shape[1]), a),
    "bmm": lambda a, b: _new((*a.shape[:2], b.shape[2]), a),
    "baddbmm": lambda bias, a, b, **_: _new((*a.shape[:2], b.shape[2]), a),
    "mv": lambda a, x: _new(a.shape[:1], a),
    "addmv": lambda bias, a, x, **_: _new(a.shape[:1], a),
    "sort.stable": _no_sort,
}


@contextlib.contextmanager
def no_arithmetic() -> Iterator[None]:
    """Let matrix products and sorts on the CPU return uninitialised tensors.

    A product of bf16 matrices takes milliseconds on a CPU without such instructions.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the CPU has kernels already
        for name, function in _NO_ARITHMETIC.items():
            library.impl(name, function, "CPU")
    try:
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def no_gpu() -> Iterator[list[NoKernel]]:
    """Treat CPU tensors as tensors on an sm_90; nothing is compiled or launched.

    Yields:
        The fake kernels, in order of their first launch.
    """
    kernels: list[NoKernel] = []
    driver = NoDriver(next(devices))

    def fake_compile(kernel: Any, key: Any, signature: Any, *_: Any) -> NoKernel:
        kernels.append(NoKernel(signature))
        kernel.device_caches[driver.device][0][key] = kernels[-1]
        return kernels[-1]

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "_do_compile", fake_compile))
        for owner, name, value in (
            (device, "_capability", ARCHITECTURE),
            (launch_cache, "uses_cache", True),
            (attention, "check_nonnegative", None),  # reads values only on the CPU
        ):
            stack.enter_context(mock.patch.object(owner, name, functools.partial(_constant, value)))
        stack.enter_context(
            mock.patch.object(device, "_MULTIPROCESSORS", {ARCHITECTURE: MULTIPROCESSORS})
        )
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        launch_cache.clear()  # drop the launches of earlier fake kernels
        yield kernels


def nothing(slot: str, backward: bool) -> Callable[..., Any]:
    """Return a slot function that returns uninitialised tensors of the contract's shapes."""

    def forward(*tensors: torch.Tensor, call: SlotCall) -> Any:
        specs = output_specs(slot, tensors, call.geometry.num_selected_blocks)
        outs = tuple(
            torch.empty(shape, dtype=dtype, device=tensors[0].device) for shape, dtype in specs
        )
        return outs if len(outs) > 1 else outs[0]

    def gradients(do: torch.Tensor, *tensors: torch.Tensor, call: SlotCall) -> Any:
        return tuple(torch.empty_like(t) for t in tensors[: len(DIFFERENTIABLE[slot])])

    return gradients if backward else forward


for _slot in SLOTS:
    for _backward in (False, True):
        globals()[f"{_slot}_{'backward' if _backward else 'forward'}"] = nothing(_slot, _backward)


def make_plan(config: NSAConfig, backend: str, varlen: bool) -> Plan:
    """Build a plan that runs every slot on ``backend``, without its probe."""
    specs = dict(nsa_register_backends().slots)
    if backend == "nothing":
        for slot in SLOTS:
            specs[slot] = SlotSpec(
                f"{__name__}:{slot}_forward",
                f"{__name__}:{slot}_backward" if slot != "select" else None,
            )
    fused = {}
    if backend == "triton":
        path = nsa_register_backends().fused["backward"]
        fused["backward"] = core_backward(backend, path)
    options = {"dtype": "bfloat16", "needs_grad": True, "varlen": varlen}
    requests = {slot: request_of(config, slot, **options) for slot in SLOTS}
    geometry = tuple(config.geometry.as_ints())
    kernels = {
        slot: Kernel(
            backend,
            slot,
            slot_op(backend, slot, specs[slot]).op,
            config.softmax_scale,
            geometry,
            False,
        )
        for slot in SLOTS
    }
    return Plan(config, requests, {}, _slots=specs, fused=fused, **kernels)


class CountOperators(TorchDispatchMode):
    """Count the PyTorch operators that run inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.name().startswith("nsa_"):
            self.counts[func.name().removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class Row:
    """The host overhead of one call."""

    backend: str
    call: str
    us: float
    launches: int
    ops: dict[str, int]


def measure(
    backend: str, call: str, step: Callable[[], Any], kernels: list[NoKernel], repeats: int
) -> Row:
    """Return the first decile of the time of ``step``, its launches and its operators."""
    for _ in range(5):
        step()
    before = sum(k.launches for k in kernels)
    with CountOperators() as counted:
        step()
    launches, times = sum(k.launches for k in kernels) - before, []
    for _ in range(repeats):
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    return Row(
        backend,
        call,
        sorted(times)[len(times) // 10] * 1e6,
        launches,
        dict(counted.counts.most_common()),
    )


def slot_steps(
    config: NSAConfig, plan: Plan, tokens: int, packed: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the forward of each slot without autograd, and the backward operator."""
    lead = [tokens] if packed else [1, tokens]
    keys = (
        config.geometry.max_compressed(tokens) if packed else config.geometry.num_compressed(tokens)
    )
    rows = [keys] if packed else [1, keys]
    hq, g, dk, dv = config.n_heads, config.n_kv_heads, config.qk_dim, config.v_dim

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    q, do, lse = (
        tensor(*lead, hq, dk),
        tensor(*lead, hq, dv),
        tensor(*lead[:-1], hq, tokens, dtype=torch.float32),
    )
    blocks = torch.zeros(*lead, g, config.geometry.num_selected_blocks, dtype=torch.int32)
    inputs = {
        "cmp": [q, tensor(*rows, g, dk), tensor(*rows, g, dv)],
        "select": [q, tensor(*rows, g, dk), lse],
        "sel": [q, tensor(*lead, g, dk), tensor(*lead, g, dv), blocks],
        "win": [q, tensor(*lead, g, dk), tensor(*lead, g, dv)],
        "combine": [tensor(*lead, hq, 3, dtype=torch.float32), do, do, do],
    }
    cu = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32) if packed else None
    for slot, tensors in inputs.items():
        kernel = getattr(plan, slot)
        op = slot_op(kernel.backend, slot, plan._slots[slot])
        tail = (cu, tokens, kernel.scale, kernel.geometry, kernel.deterministic, None)
        yield (
            f"{slot}.forward",
            lambda kernel=kernel, tensors=tensors: kernel(*tensors, cu_seqlens=cu),
        )
        if slot != "select":
            saved = [*tensors, *([do, lse] if slot != "combine" else [])]
            yield (
                f"{slot}.backward",
                lambda op=op, saved=saved, tail=tail: op.backward_op(do, *saved, *tail),
            )


def whole_steps(
    config: NSAConfig, plan: Plan, tokens: int, packed: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield nsa_attention and NSAttention: forward, and forward with backward."""
    lead = [tokens] if packed else [1, tokens]
    hq, g, dk, dv = config.n_heads, config.n_kv_heads, config.qk_dim, config.v_dim

    def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, requires_grad=True)

    q, gates = leaf(*lead, hq, dk), leaf(*lead, hq, 3, dtype=torch.float32)
    k, v = [leaf(*lead, g, dk) for _ in range(3)], [leaf(*lead, g, dv) for _ in range(3)]
    packing = (
        {"cu_seqlens": torch.tensor([0, tokens // 2, tokens], dtype=torch.int32)} if packed else {}
    )
    layer, x = NSAttention(config).bfloat16(), leaf(*lead, config.dim)
    do = torch.zeros(*lead, hq, dv, dtype=torch.bfloat16)

    def core() -> torch.Tensor:
        return nsa_attention(
            q, k, v, gates, config=config, plan=plan, nonnegative_gates=True, **packing
        )

    def whole_layer() -> torch.Tensor:
        return layer(x, plan=plan, **packing)

    for name, call, leaves, grad in (
        ("nsa_attention", core, [q, *k, *v, gates], do),
        ("NSAttention", whole_layer, [x, *layer.parameters()], torch.zeros_like(x)),
    ):
        yield f"{name}.forward", call

        def both(call: Any = call, leaves: Any = leaves, grad: Any = grad) -> Any:
            return torch.autograd.grad(call(), leaves, grad, allow_unused=True)

        yield f"{name}.both", both


def block_steps(
    config: NSAConfig, plan: Plan, tokens: int, packed: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield a training block of the language model: bf16 autocast, fp32 parameters, phi mlp."""
    small = dataclasses.replace(
        config, compress="mlp", compress_block_size=8, compress_stride=4, select_block_size=16
    )
    block, x = (
        Block(LMConfig(small, n_layers=1), None, 0),
        torch.zeros(1, tokens, config.dim, requires_grad=True),
    )
    plan_of_block, grad = (
        make_plan(small, plan.cmp.backend, False),
        torch.zeros(1, tokens, config.dim),
    )
    block.attn.resolve_plan = lambda *_: plan_of_block  # type: ignore[method-assign,union-attr]

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)

    yield "Block.forward", forward
    yield "Block.both", lambda: torch.autograd.grad(forward(), [x, *block.parameters()], grad)


def long_steps(
    config: NSAConfig, plan: Plan, tokens: int, packed: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield nsa_attention with the kernels of long sequences: lists of pairs, which are sorted."""
    pick = configs.pick
    limits = ("SHARE_ALL_MAX_LEN", "MAX_LEN", "BUSY_MAX_LEN")  # of short sequences

    def pick_long(*args: Any, **traits: Any) -> Any:
        settings = pick(*args, **traits)
        return {name: 0 if name in limits else value for name, value in settings.items()}

    for name, step in whole_steps(config, plan, tokens, packed):
        if name.startswith("nsa_attention"):
            launch_cache.clear()
            with mock.patch.object(configs, "pick", pick_long):
                yield f"long {name}", step
    launch_cache.clear()


def decode_steps(
    config: NSAConfig, plan: Plan, tokens: int, packed: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield a decode step of NSAttention over a cache; backend ``nothing`` has no decode forms."""
    if plan.cmp.backend != "triton" or packed:
        return
    with mock.patch("nsa_backend_triton.probe.probe", return_value=()):
        layer = NSAttention(config, backends="triton").bfloat16()
        cache = layer.new_cache(1, 1 << 15)
    x = torch.zeros(1, 1, config.dim, dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return layer(x, cache=cache)

    yield "NSAttention.decode", step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="16/1/128")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--backends", default="nothing,triton")
    parser.add_argument("--only", default="")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--profile", action="store_true", help="also print a profile of each call")
    parser.add_argument("--ops", action="store_true", help="also print the operators")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hq, g, d = (int(n) for n in options.shape.split("/"))
    config = NSAConfig(dim=hq, n_heads=hq, n_kv_heads=g, head_dim=d, compress="mean")
    with no_gpu() as kernels, no_arithmetic():
        for backend in options.backends.split(","):
            plan = make_plan(config, backend, options.packed)
            for steps in (slot_steps, whole_steps, long_steps, block_steps, decode_steps):
                for call, step in steps(config, plan, options.tokens, options.packed):
                    if options.only not in call:
                        continue
                    row = measure(backend, call, step, kernels, options.repeats)
                    operators = f"{sum(row.ops.values()):4} ops" + f"  {row.ops}" * options.ops
                    print(
                        f"{backend:8} {call:24} {row.us:8.1f} us {row.launches:3} launches"
                        f" {operators}",
                        flush=True,
                    )
                    if options.profile:
                        with cProfile.Profile() as profiler:
                            for _ in range(options.repeats):
                                step()
                        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
