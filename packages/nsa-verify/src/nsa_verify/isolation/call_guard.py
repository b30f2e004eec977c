"""A guard around every call of a backend's function: its exceptions, inputs, results and state.

A kernel that raises anything, changes an input or the global state, prints (in a child process), or
returns tensors that share memory with others gives an NSAError, which is reported as a failed row.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from nsa_core.errors import NSAError
from nsa_core.torch_ops.call_wrapper import Where, wrapped_calls
from nsa_core.torch_ops.torch_state import is_capturing
from nsa_core.util.child import announced, last_line, printed
from nsa_core.util.global_state import GlobalState
from nsa_core.util.interruption import is_ctrl_c
from nsa_core.util.text import describe_error

_INTEGERS: dict[int, torch.dtype] = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}
NOT_CALLED = ": not called: "  # in the message about a function that is not called any more
_refused: dict[tuple[str, ...], str] = {}  # functions that are not called any more -> why
# Fused form -> the arguments that it writes: raw, sel and win; k_cmp and v_cmp.
_WRITTEN = {"append": (3, 4, 5), "compress": (2, 3)}


class Guard:
    """Checks calls of backend functions.

    Args:
        passing: Exceptions that are not the function's own, such as those of a time limit.
    """

    def __init__(self, passing: tuple[type[BaseException], ...] = ()) -> None:
        self._passing = passing

    def __call__(
        self,
        where: Where,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> Any:
        """Call ``function`` and check what it did.

        Raises:
            NSAError: The function raised a BaseException that is no Exception, or an error that
                only nsa_core may raise; or it broke a rule of the contract. Other exceptions pass.
        """
        if why := _refused.get(where):
            raise NSAError(f"{describe(where)}{NOT_CALLED}{why}")
        if where[2] in ("import", "plugin"):
            with announced(where, describe(where)):
                return function(*arguments, **options)
        slot = where[1]
        written = _WRITTEN.get(slot, ())
        named = {f"argument {i + 1}": a for i, a in enumerate(arguments) if i not in written}
        sources = [(name, t) for name, a in (named | dict(options)).items() for t in _tensors(a)]
        inputs = [t for _, t in sources]
        if not all(map(_is_plain, inputs)) or torch._C._len_torch_dispatch_stack():
            return self._run(where, function, arguments, options)
        # A graph that is being captured must not wait for the device.
        watched = [] if any(is_capturing(t.device) for t in inputs[:1]) else inputs
        copies, versions = [t.clone() for t in watched], [_version(t) for t in watched]
        printed()  # text from before this call
        state = GlobalState()
        try:
            results = self._run(where, function, arguments, options)
        finally:
            changed_state = state.restore()
        faults = _result_faults(results, inputs, slot)
        faults += [
            f"it changed {name} in place, {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
            for (name, t), copy, version in zip(sources, copies, versions)
            if _version(t) != version or not _same_bits(t, copy)
        ]
        faults += [f"it changed {', '.join(changed_state)}"] * bool(changed_state)
        if text := printed():
            faults.append(f"it printed to standard output: {last_line(text)!r}")
        if faults:
            raise NSAError(f"{describe(where)}: {'; '.join(faults)}")
        return results

    def _run(
        self,
        where: Where,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> Any:
        try:
            with announced(where, describe(where)):
                return function(*arguments, **options)
        except self._passing:
            raise
        except BaseException as error:
            # BackendCall turns every other Exception into an NSAError, with its traceback.
            is_ordinary = isinstance(error, Exception) and not isinstance(error, NSAError)
            if is_ordinary or type(error) is NSAError or is_ctrl_c(error):
                raise
            # Unsupported would count as a refusal, and InvalidInput would end the command.
            text = f"{describe(where)}: it raised {describe_error(error)}"
            raise NSAError(text) from error


def describe(where: Where) -> str:
    """Return ``where`` as the beginning of a message."""
    backend, what, doing = where
    if doing == "import":
        return f"backend {backend!r}, import of module {what.partition(':')[0]!r}"
    if doing == "plugin":
        return f"backend {backend!r}, call of {what!r}"
    return f"backend {backend!r}, slot {what!r}, {doing}"


def refuse_calls(functions: Mapping[tuple[str, ...], str]) -> None:
    """Call these functions no more: a guarded call raises NSAError with the reason given here."""
    _refused.update(functions)


@contextlib.contextmanager
def guarded_calls(passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Check every call of a backend's function inside the block; see :class:`Guard`."""
    with wrapped_calls(Guard(passing)):
        yield


def _tensors(*values: Any) -> list[torch.Tensor]:
    """Return the tensors in ``values``, in their lists and mappings, and in fields of objects."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += _tensors(*value)
        elif isinstance(value, Mapping):
            tensors += _tensors(*value.values())
        elif type(value).__name__ in ("SlotCall", "DecodeCall"):
            tensors += _tensors(*vars(value).values())
    return tensors


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same_bits(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    kind = _INTEGERS[tensor.element_size()]
    return torch.equal(tensor.detach().view(kind), copy.detach().view(kind))


def _result_faults(results: Any, inputs: Sequence[torch.Tensor], slot: str) -> list[str]:
    """List what is wrong with the results; nsa_core checks shapes, dtypes and devices."""
    if results is None and slot == "compress":
        return []
    tensors = list(results) if isinstance(results, (list, tuple)) else [results]
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        names = ", ".join(type(t).__name__ for t in tensors)
        return [f"it returned {names}, expected tensors"]
    faults = []
    for index, result in enumerate(tensors):
        # The fused form append may return q itself if it rotates nothing.
        if slot != "append" and any(_overlap(result, t) for t in inputs):
            faults.append(f"its result {index} shares memory with an input")
    for (i, one), (j, other) in itertools.combinations(enumerate(tensors), 2):
        if _overlap(one, other):
            faults.append(f"its results {i} and {j} share memory")
    return faults


def _overlap(result: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the memory of ``result`` overlaps that of ``other``.

    Of results with gaps between their elements, only the same view counts.
    """
    if result.device != other.device or not result.numel() or not other.numel():
        return False
    if not result.is_contiguous():
        return result.data_ptr() == other.data_ptr() and result.stride() == other.stride()
    start, end = _span(result)
    other_start, other_end = _span(other)
    return start < other_end and other_start < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of ``tensor`` and the address past its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
