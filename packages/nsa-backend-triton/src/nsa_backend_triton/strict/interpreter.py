"""A strict Triton interpreter: what a CPU must catch because no GPU is there to catch it.

    with strict():  # TRITON_INTERPRET=1 must be set before triton is imported
        kernel[grid](...)

bf16 is bf16 (stock: raw uint16 in arithmetic and tl.dot, truncation when rounding). Loads and
stores must stay inside the tensors passed in (stock: garbage, or a crash). Masked-off lanes of a
load without ``other`` hold NaN (stock: 0). int32 overflow and tl.device_assert raise. Two programs
may not store to one address. Programs run in a seeded random order. Grids that a GPU refuses are
refused. Every launch is an event of torch's profiler, named after its kernel.

One thread at a time: triton's interpreter is itself global state.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    from nsa_backend_triton.strict.memory_model import Machine, Seen


def interpreted() -> bool:
    """Whether triton is there and interprets its kernels in this process."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except (
        ImportError,
        OSError,
        RuntimeError,
    ):  # a broken triton interprets nothing, and is no trouble here
        return False
    # What counts is what the variable was when triton's own functions were made, not what it is
    # now.
    return isinstance(tl.max, interpreter.InterpretedFunction)


_running: list[Machine] = []  # the machine of the block around, if there is one


@contextlib.contextmanager
def strict(seed: int = 0) -> Iterator[Seen]:
    """Interpret kernels strictly inside the block; ``seed`` fixes the order in which the programs
    of a grid run.

    A block inside another one counts for itself.

    Raises:
        Violation: a kernel did what a GPU would punish; triton wraps it in an InterpreterError that
            quotes it.
    """
    if _running:
        with _running[0].anew(seed) as seen:
            yield seen
        return
    import numpy as np
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    from nsa_backend_triton.strict.memory_model import Machine
    from nsa_backend_triton.strict.speedups import quickly

    machine, options = Machine(interpreter, seed), interpreter.InterpreterOptions(debug=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.multiple(interpreter.InterpreterBuilder, **machine.builder_methods())
        )
        stack.enter_context(
            mock.patch.multiple(interpreter.GridExecutor, **machine.executor_methods())
        )
        stack.enter_context(mock.patch.object(interpreter.interpreter_builder, "options", options))
        stack.enter_context(mock.patch.multiple(interpreter, **machine.module_functions()))
        stack.enter_context(mock.patch.multiple(TritonSemantic, **machine.semantic_methods()))
        stack.enter_context(quickly(interpreter))
        stack.enter_context(np.errstate(all="ignore"))
        _running.append(machine)
        stack.callback(_running.clear)
        yield machine.seen


def judge_context(device: str) -> contextlib.AbstractContextManager[Seen] | None:
    """:func:`strict` where kernels run in Triton's interpreter, which serves the CPU only;
    otherwise None.
    """
    return strict() if device == "cpu" and interpreted() else None
