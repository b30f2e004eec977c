"""Shell completion of option values. This module does not import torch.

An option has the same meaning in every command, so its name decides which values it completes to.
Options whose type is a fixed set of values, and paths, complete by themselves.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from nsa_cli import output
from nsa_core.contract import DTYPES, SLOTS
from nsa_core.util.atomic_files import write_atomic


def _backends() -> list[str]:
    from nsa_core.plan.loading import installed

    return sorted({plugin.name for plugin in installed()})


def _backends_or_pairs() -> list[str]:
    return ["auto", *_backends(), *(f"{slot}={name}" for slot in SLOTS for name in _backends())]


def _dtypes() -> list[str]:
    from nsa_cli.choices import SHORT_DTYPES

    return [*DTYPES, *SHORT_DTYPES]


def _choices(*values: str) -> Callable[[], list[str]]:
    return lambda: list(values)


_VALUES: dict[str, Callable[[], list[str]]] = {
    **dict.fromkeys(SLOTS, _backends),
    "combo": _backends_or_pairs,
    "backends": _backends_or_pairs,
    "dtype": _dtypes,
    "device": _choices("auto", "cpu", "cuda"),
    "preset": _choices("quick", "full"),
    "phase": _choices("prefill", "decode"),
    "shape": _choices("reports", "paper", "tiny"),
    "inputs": _choices("random", "real"),
    "rival": _choices("fla", "sfnsa", "xunhao"),
    "data": _choices("python-docs", "fineweb-edu", "uniform", "recall"),
    "size": _choices("tiny", "toy", "m7c_125m"),
    "attention": _choices("nsa", "dense"),
    "parallel": _choices("ddp", "fsdp"),
}
# Where a command differs from the others.
_VALUES_OF_COMMAND: dict[tuple[str, str], Callable[[], list[str]]] = {
    ("bench", "phase"): _choices("forward", "backward", "both", "decode"),
    ("conformance", "name"): _backends,
    ("show", "name"): _backends,
    ("train", "dtype"): _choices("float32", "bfloat16", "fp32", "bf16"),
}


def add(command: str, params: Iterable[Any]) -> None:
    """Give the parameters of ``command`` that complete by their name their completion.

    Args:
        command: Name of the command.
        params: Its click parameters.
    """
    for param in params:
        values = _VALUES_OF_COMMAND.get((command, param.name), _VALUES.get(param.name))
        if values is not None:
            param.shell_complete = functools.partial(_complete, values)


def write_atomically(params: Iterable[Any]) -> None:
    """Let --install-completion replace files such as ~/.bashrc whole or not at all.

    Typer overwrites them in place, and would leave them empty on a full disk.

    Args:
        params: The parameters of the command `nsa`.
    """
    for param in params:
        if param.name == "install_completion":
            param.callback = functools.partial(_install, param.callback)


def _install(callback: Callable[..., Any], *arguments: Any) -> Any:
    def write_text(path: Path, text: str, *_: Any, **__: Any) -> int:
        write_atomic(path, text, force=True)
        return len(text)

    original = Path.write_text
    Path.write_text = write_text  # type: ignore[assignment, method-assign]
    try:
        return callback(*arguments)
    finally:
        Path.write_text = original  # type: ignore[method-assign]


def _complete(values: Callable[[], Sequence[str]], ctx: Any, incomplete: str) -> list[Any]:
    """Return the values that complete the last part of a comma-separated text."""
    before, comma, last = incomplete.rpartition(",")
    return [_item_class()(before + comma + value) for value in values() if value.startswith(last)]


def _item_class() -> Any:
    # Typer depends on click or vendors it; its errors tell which.
    package = output.ClickError.__module__.rpartition(".")[0]
    return importlib.import_module(f"{package}.shell_completion").CompletionItem
