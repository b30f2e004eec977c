"""Launches that hand addresses to the C function of Triton, on a driver that launches nothing."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from nsa_core import NSAConfig

pytest.importorskip("triton")
direct_launch = importlib.import_module("nsa_backend_triton.host.direct_launch")
launch_cache = importlib.import_module("nsa_backend_triton.host.launch_cache")

CONFIG = NSAConfig(dim=12, n_heads=12, n_kv_heads=2, head_dim=64)
TMA_ARGUMENTS = 8  # address, swizzle, element size and type, block, shape, strides, padding


def step_of(bench: Any, name: str) -> Callable[[], Any]:
    plan = bench.make_plan(CONFIG, "triton", False)
    step: Callable[[], Any] = dict(bench.slot_steps(CONFIG, plan, 80, False))[name]
    return step


def address(x: Any) -> Any:
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


def test_cached_launch_passes_the_addresses_of_its_own_tensors(bench: Any, no_gpu: Any) -> None:
    """Inputs move between two calls: pointers and tensor maps must follow them."""
    plan = bench.make_plan(CONFIG, "triton", False)
    for _ in range(3):
        q = torch.zeros(1, 80, 12, 64, dtype=torch.bfloat16)
        k, v = torch.zeros(2, 1, 80, 2, 64, dtype=torch.bfloat16)
        o, lse = plan.win(q, k, v)
        (kernel,) = no_gpu
        arguments = kernel.arguments[bench.BASE_ARGUMENTS :]
        assert [address(x) for x in arguments[:3]] == [x.data_ptr() for x in (q, k, v)]
        maps = [x for x in arguments if isinstance(x, tuple) and len(x) == TMA_ARGUMENTS]
        assert [x[0] for x in maps] == [k.data_ptr(), v.data_ptr()]
        places = [i - bench.BASE_ARGUMENTS for i in kernel.tensors]
        assert {o.data_ptr(), lse.data_ptr()} <= {address(arguments[i]) for i in places}
    assert isinstance(kernel.arguments[bench.BASE_ARGUMENTS], int), "the last launch was direct"


def test_tensor_maps_of_a_descriptor_are_bounded() -> None:
    asked: list[int] = []

    def expand(x: int) -> list[Any]:
        asked.append(x)
        return [f"map of {x}", 80, 2]

    expansion = direct_launch._Expansion(expand, 0)
    assert expansion.rest == (80, 2)
    with mock.patch.object(direct_launch, "MAX_MAPS", 2):
        for address in (1, 2, 1, 2, 3, 3, 1):
            assert expansion.map_of(address, address) == f"map of {address}"
    assert asked == [0, 1, 2, 3, 1]


def test_hooks_of_a_profiler_are_called_at_cached_launches(bench: Any, no_gpu: Any) -> None:
    from triton import knobs

    step = step_of(bench, "combine.forward")
    step()
    seen: list[str] = []

    def enter(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    def leave(metadata: Any) -> None:
        seen.append("left")

    knobs.runtime.launch_enter_hook.add(enter)
    knobs.runtime.launch_exit_hook.add(leave)
    try:
        step()
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
        knobs.runtime.launch_exit_hook.remove(leave)
    step()
    assert seen == ["nothing", "left"]


@pytest.mark.parametrize("reason", ["scratch", "launcher", "closure"])
def test_a_binary_that_only_triton_can_launch_goes_through_triton(
    reason: str, bench: Any, no_gpu: Any
) -> None:
    step = step_of(bench, "win.forward")
    original = direct_launch.direct_launch

    def changed(compiled: Any, *args: Any) -> Any:
        if reason == "scratch":
            compiled.run.global_scratch_size = 8
        elif reason == "launcher":
            compiled._run = lambda *passed: None
        else:
            inner = compiled.run.launch
            compiled.run.launch = lambda *passed: inner(*passed)
        return original(compiled, *args)

    with mock.patch.object(launch_cache, "direct_launch", changed):
        step()
    launch = next(x for x in _launches() if x._kernel.__name__ == "span_forward")
    assert launch._direct is None
    if reason != "scratch":  # that needs an allocator
        with mock.patch.object(launch, "_kernel", None):  # the binary is not looked up again
            step()


def laid_out(kernel: Any) -> Any:
    tensors, after = (torch.zeros(8), torch.zeros(8)), (80, 2.5)
    return direct_launch.direct_launch(kernel, (3, 1, 1), tensors, after, lambda _: 7, 0)


@pytest.fixture
def kernel(bench: Any) -> Any:
    """A kernel of few arguments: two tensors and two numbers."""
    return bench.NoKernel({"x": "*fp32", "y": "*fp32", "n": "i32", "scale": "fp32"})


def test_a_kernel_of_few_arguments_is_laid_out(bench: Any, kernel: Any) -> None:
    x, y = torch.zeros(8), torch.zeros(8)
    assert laid_out(kernel)((x, y))
    assert kernel.arguments[:5] == (3, 1, 1, 7, kernel.function)
    assert kernel.arguments[bench.BASE_ARGUMENTS :] == (x.data_ptr(), y.data_ptr(), 80, 2.5)


def test_a_tensor_that_begins_off_16_bytes_is_left_to_triton(kernel: Any) -> None:
    """Also in a launch that has something else than tensors."""
    x, off = torch.zeros(8), torch.zeros(9)[1:]
    tensors = (x, None)
    with_none = direct_launch.direct_launch(kernel, (3, 1, 1), tensors, (80,), lambda _: 7, 0)
    launches, before = (laid_out(kernel), with_none), kernel.launches
    assert [launch((off, y)) for launch, y in zip(launches, (x, None))] == [False, False]
    assert kernel.launches == before
    assert [launch((x, y)) for launch, y in zip(launches, (x, None))] == [True, True]


def test_a_launcher_that_passes_one_tuple_is_left_to_triton(kernel: Any) -> None:
    """Triton 3.7 and later: the C function takes the arguments of the kernel as one."""

    class Launcher(direct_launch.nvidia.CudaLauncher):  # type: ignore[misc]
        def __call__(self, *arguments: Any) -> None:
            self.launch(*arguments[:5], False, False, *arguments[5:9], None, None, arguments[9:])

    kernel.run.__class__ = Launcher
    assert laid_out(kernel) is None


def test_a_launcher_without_a_c_function_is_left_to_triton(kernel: Any) -> None:
    class Launcher(direct_launch.nvidia.CudaLauncher):  # type: ignore[misc]
        def __call__(self, *arguments: Any) -> None:
            """Launch in some other way."""

    kernel.run.__class__ = Launcher
    assert laid_out(kernel) is None


def test_descriptors_without_metadata_are_left_to_triton(kernel: Any) -> None:
    """Triton 3.4: the wrapper of the C function may hold None."""

    def wrapped(launcher: Any, tensordesc_meta: Any) -> Any:
        return lambda *arguments: launcher(*arguments, tensordesc_meta)

    descriptors = importlib.import_module("nsa_backend_triton.host.descriptors")
    described = descriptors.key_descriptor(torch.zeros(1, 16, 1, 64), 16)
    kernel.run.launch = wrapped(print, None)
    tensors = torch.zeros(8), described
    assert not direct_launch.direct_launch(kernel, (3, 1, 1), tensors, (80,), lambda _: 7, 0)


def test_the_layout_is_recorded_without_a_launch_and_without_a_copy_of_the_binary(
    bench: Any,
) -> None:
    """In triton 3.4 ``run`` is no property over ``_run``; from 3.8 on, a binary unloads itself."""
    unloaded: list[int] = []

    class Kernel(bench.NoKernel):  # type: ignore[misc,name-defined]
        @property
        def run(self) -> Any:
            return self.launcher

        def __del__(self) -> None:
            unloaded.append(self.module)

    kernel = Kernel({"x": "*fp32", "y": "*fp32", "n": "i32", "scale": "fp32"})
    kernel.launcher = kernel._run
    assert laid_out(kernel) is not None
    gc.collect()
    assert kernel.launches == 0
    assert not unloaded


def _launches() -> Iterator[Any]:
    for table in launch_cache._tables:
        for value in table.values():
            for x in value if isinstance(value, tuple) else (value,):
                if isinstance(x, launch_cache.Launch):
                    yield x
