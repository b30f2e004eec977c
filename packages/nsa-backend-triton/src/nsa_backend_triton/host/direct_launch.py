"""Launch a compiled kernel with little Python: the arguments that never change are laid out once.

At every launch, Triton's own launcher runs four Python functions and two lists of hooks, loops over
all arguments, constants included, to expand descriptors, asks each tensor for its address, and asks
the CUDA driver whether a kernel may read it. A :class:`DirectLaunch` hands the same C function the
same arguments, with addresses in place of tensors.

The layout of the arguments is recorded from a call of Triton's launcher that stops before the C
function. In triton 3.4 to 3.6, each argument of the kernel is an argument of the C function. Later
versions pass them as one tuple; with those, every launch goes through Triton's own launcher.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_MAPS = 64  # tensor maps kept per descriptor: an allocator returns the same addresses again


def has_hooks() -> bool:
    """Return whether a profiler of Triton has hooks around launches."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # Each has a list of hooks, which may be empty; in older versions it is one function or None.
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


class _Expansion:
    """The arguments that stand for one descriptor: a tensor map, then its shape and strides."""

    def __init__(self, expand: Callable[[Any], list[Any]], descriptor: Any) -> None:
        self._expand, self.rest = expand, tuple(expand(descriptor)[1:])
        self._maps: dict[int, Any] = {}

    def map_of(self, address: int, descriptor: Any) -> Any:
        """Return the tensor map of ``descriptor``, whose base begins at ``address``."""
        tensor_map = self._maps.get(address)
        if tensor_map is None:
            if len(self._maps) >= MAX_MAPS:
                self._maps.clear()
            tensor_map = self._maps[address] = self._expand(descriptor)[0]
        return tensor_map


class DirectLaunch:
    """A compiled kernel with its grid and constants; call it with the tensors.

    Args:
        function: The C function of Triton's launcher.
        before: Its arguments before the stream.
        between: Its arguments between the stream and those of the kernel.
        expansions: For each tensor of the kernel: how its descriptor expands, or None for a tensor.
            Empty if all of them are tensors.
        after: The arguments of the kernel after the tensors.
        stream_of: Returns the current stream of a device.
        device: The device of the binary.
    """

    def __init__(
        self,
        function: Callable[..., None],
        before: tuple[Any, ...],
        between: tuple[Any, ...],
        expansions: tuple[_Expansion | None, ...],
        after: tuple[Any, ...],
        stream_of: Callable[[int], int],
        device: int,
    ) -> None:
        self._function, self._before, self._between = function, before, between
        self._expansions, self._after = expansions, after
        self._stream_of, self._device = stream_of, device

    def __call__(self, tensors: Sequence[Any]) -> bool:
        """Launch on the current stream, and return True.

        Args:
            tensors: Tensors, descriptors and None, as in the launch that was laid out. Descriptors
                may differ from those in their base alone.

        Returns:
            False, without a launch, if a tensor does not begin on 16 bytes, because it needs
            another binary.
        """
        if not self._expansions:
            arguments = [x.data_ptr() for x in tensors]
            if functools.reduce(operator.or_, arguments) % 16:
                return False
        else:
            arguments = []
            for x, expansion in zip(tensors, self._expansions):
                if x is None:
                    arguments.append(None)
                    continue
                address = (x if expansion is None else x.base).data_ptr()
                if address % 16:
                    return False
                if expansion is None:
                    arguments.append(address)
                else:
                    arguments += (expansion.map_of(address, x), *expansion.rest)
        stream = self._stream_of(self._device)
        self._function(*self._before, stream, *self._between, *arguments, *self._after)
        return True


def direct_launch(
    compiled: CompiledKernel,
    grid: tuple[int, int, int],
    tensors: Sequence[Any],
    after: tuple[Any, ...],
    stream_of: Callable[[int], int],
    device: int,
) -> DirectLaunch | None:
    """Return the direct launch of a binary.

    Args:
        compiled: The binary, which has been launched before.
        grid: The grid.
        tensors: Tensors, descriptors and None, which begin on 16 bytes.
        after: The arguments of the kernel after the tensors.
        stream_of: Returns the current stream of a device.
        device: The device of the binary.

    Returns:
        None if only Triton's launcher can launch the binary: it allocates scratch memory, or the
        installed version of Triton has another launcher.
    """
    launcher = compiled.run
    if not isinstance(launcher, nvidia.CudaLauncher) or _needs_scratch(launcher):
        return None
    stream, arguments = object(), (*tensors, *after)
    recorded = _recorded(compiled, grid, arguments, stream)
    prefix, passed = recorded[: -len(arguments)], recorded[-len(arguments) :]
    place = next((i for i, x in enumerate(prefix) if x is stream), None)
    if place is None or any(x is not y for x, y in zip(passed, arguments)):
        return None
    function, metadata = launcher.launch, []
    if inspect.isfunction(function):  # it expands descriptors and calls the C function
        closure = inspect.getclosurevars(function).nonlocals
        if not {"launcher", "tensordesc_meta"} <= closure.keys():
            return None
        function, metadata = closure["launcher"], list(closure["tensordesc_meta"] or ())
    if None in metadata or len(metadata) != sum(isinstance(x, TensorDescriptor) for x in tensors):
        return None  # descriptors are not tensor maps, or the C function expands them
    expansions = tuple(
        _expansion(x, metadata.pop(0)) if isinstance(x, TensorDescriptor) else None for x in tensors
    )
    if all(isinstance(x, Tensor) for x in tensors):
        expansions = ()
    before, between = prefix[:place], prefix[place + 1 :]
    return DirectLaunch(function, before, between, expansions, after, stream_of, device)


def _needs_scratch(launcher: Any) -> bool:
    names = ("global_scratch_size", "profile_scratch_size")
    return any(getattr(launcher, name, 0) for name in names)


def _expansion(descriptor: Any, metadata: Any) -> _Expansion:
    return _Expansion(lambda x: nvidia.make_tensordesc_arg(x, metadata), descriptor)


def _recorded(
    compiled: CompiledKernel, grid: tuple[int, int, int], arguments: tuple[Any, ...], stream: object
) -> tuple[Any, ...]:
    """Return the arguments that Triton's launcher passes on, with descriptors as they are.

    The C function calls hooks that are not None, with the metadata of the launch: here they are
    None. Only the launcher is copied: from triton 3.8 on, a CompiledKernel unloads its binary when
    it is deleted, and so would a copy.
    """
    recorded: list[tuple[Any, ...]] = []
    launcher = copy.copy(compiled.run)
    launcher.launch = lambda *passed: recorded.append(passed)
    metadata_and_hooks = (compiled.packed_metadata, None, None, None)
    launcher(*grid, stream, compiled.function, *metadata_and_hooks, *arguments)
    return recorded[0] if recorded else ()
