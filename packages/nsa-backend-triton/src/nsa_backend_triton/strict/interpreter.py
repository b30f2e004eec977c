"""A strict Triton interpreter, which detects on a CPU the errors that a GPU would punish.

    with strict():  # TRITON_INTERPRET=1 must be set before triton is imported
        kernel[grid](...)

Differences from Triton's own interpreter:

- bf16 is rounded to nearest even. Triton's computes with the raw uint16 and truncates.
- tl.fma rounds once. Triton's rounds the product as well.
- Loads and stores must stay inside the tensors passed in. Triton's reads garbage or crashes.
- Masked-off lanes of a load without ``other`` hold NaN. Triton's hold 0.
- int32 overflow and tl.device_assert raise.
- Two programs must not store to one address.
- Programs run in a random order, fixed by a seed.
- Grids larger than a GPU accepts are refused.
- Every launch is an event of torch's profiler, named after its kernel.

Use it from one thread at a time, because Triton's interpreter is global state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    from nsa_backend_triton.strict.memory_model import Counts, Machine


def interpreted() -> bool:
    """Return whether Triton is installed and interprets its kernels in this process."""
    try:
        from nsa_backend_triton.host import device
    except (ImportError, OSError, RuntimeError):  # the probe reports a Triton that is broken
        return False
    return device.interpreted()


_running: list[Machine] = []  # the machine of the outermost active block


@contextlib.contextmanager
def strict(seed: int = 0) -> Iterator[Counts]:
    """Interpret kernels strictly inside the block.

    Args:
        seed: Fixes the random order in which the programs of a grid run.

    Yields:
        Counts of the programs, bytes and operations of the block. A nested block has its own counts
        and its own order.

    Raises:
        Violation: A kernel broke a rule. Triton wraps it in an InterpreterError with its message.

    Example:
        >>> with strict() as counts:
        ...     kernel[grid](x, y)
        >>> counts.programs
    """
    if _running:
        with _running[0].nested(seed) as counts:
            yield counts
        return
    import numpy as np
    from triton.runtime import interpreter

    from nsa_backend_triton.strict.memory_model import Machine
    from nsa_backend_triton.strict.speedups import speedups

    machine, options = Machine(interpreter, seed), interpreter.InterpreterOptions(debug=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(interpreter.interpreter_builder, "options", options))
        for owner, methods in machine.methods().items():
            stack.enter_context(mock.patch.multiple(owner, **methods))
        stack.enter_context(speedups(interpreter))
        stack.enter_context(np.errstate(all="ignore"))
        _running.append(machine)
        stack.callback(_running.clear)
        yield machine.counts


def judge_context(device: str) -> contextlib.AbstractContextManager[Counts] | None:
    """Return :func:`strict` if kernels on ``device`` run in Triton's interpreter, otherwise None.

    Triton's interpreter serves the CPU only.
    """
    return strict() if device == "cpu" and interpreted() else None
