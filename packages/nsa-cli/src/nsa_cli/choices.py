"""What options that several commands share stand for: devices, dtypes, block sizes, combinations.
Torch comes last.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from nsa_core.errors import InvalidInput

if TYPE_CHECKING:
    import typer


def options_said(context: typer.Context) -> set[str]:
    """Parameters that stand on the command line, and are no defaults."""
    return {
        n
        for n in context.params
        if getattr(context.get_parameter_source(n), "name", "") == "COMMANDLINE"
    }


def spelt(names: Sequence[str]) -> str:
    """Parameters as they are typed: "--page-size, --batch"."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


@contextlib.contextmanager
def said_as_options(names: Mapping[str, str]) -> Iterator[None]:
    """An InvalidInput about a field names the option instead: ``names`` has the parameter of each
    ("lr").

    Fields stand where a message begins to speak of one ("clip must", "batch 3 does", "graph=True
    needs"): a path in it stays as it is.
    """
    try:
        yield
    except InvalidInput as error:
        fields = rf"(^|; | over )({'|'.join(names)})(=True|(?= must | \d))"
        raise InvalidInput(
            re.sub(fields, lambda m: m[1] + spelt([names[m[2]]]), str(error))
        ) from error


def words(text: str) -> list[str]:
    """The words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def dtype_names(text: str) -> list[str]:
    """The dtypes of --dtype, each once.

    Raises:
        InvalidInput: one is none of the contract's, or there is none.
    """
    from nsa_core.contract import DTYPES

    names = list(dict.fromkeys(words(text)))
    wrong = [name for name in names if name not in DTYPES]
    if wrong or not names:
        raise InvalidInput(
            f"--dtype must be of {', '.join(DTYPES)}, got {', '.join(wrong) or 'nothing'}"
        )
    return names


def block_sizes(text: str) -> tuple[int, ...]:
    """The integers of --blocks.

    Raises:
        InvalidInput: they are no integers; how many there must be is the shape's to say.
    """
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise InvalidInput(f"--blocks must be five integers l,d,l',n,w, got {text!r}") from None


def named_backends(text: str) -> dict[str, str] | None:
    """What :class:`nsa_core.NSAttention` takes for the words of --backends.

    Raises:
        InvalidInput: they name no slot, or one twice.
    """
    from nsa_verify.combination import parse_combination

    return dict(parse_combination(text).backends) or None


def quiet_profiler() -> None:
    """Call it before torch loads: some builds of its profiler write to stderr at every start and
    stop.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def pick_device(text: str, threads: int | None = None) -> str:
    """The device of --device, "auto" being cuda where there is one; torch uses ``threads`` CPU
    threads from here on.

    Raises:
        InvalidInput: torch knows no such device.
        BackendUnavailable: it is not there.
    """
    quiet_profiler()
    import torch

    from nsa_core.dispatch.device import known_device

    if threads is not None:
        torch.set_num_threads(threads)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if text == "auto" else text
    known_device(device)
    return device
