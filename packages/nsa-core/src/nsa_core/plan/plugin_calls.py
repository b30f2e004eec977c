"""Calls of a plugin's own functions: here, or in the child process of the plugin. No torch.

Plugins are third-party code: whatever one does becomes a reason against it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from nsa_core.contract import Rank, Reason, Request
from nsa_core.errors import NSAError
from nsa_core.plan.loading import BackendEntry, Plugin, load
from nsa_core.plan.spec_checks import is_reason
from nsa_core.torch_ops.call_wrapper import call_function, import_function
from nsa_core.util.child import Child, ChildEnded
from nsa_core.util.global_state import SETTINGS, is_new, loading, report_change, take_reports
from nsa_core.util.interruption import is_ctrl_c
from nsa_core.util.text import describe_error

# Codes of the reasons that candidates gives for a plugin that misbehaves.
FAULTS = tuple(
    f"{function}_{fault}"
    for function in ("probe", "rank")
    for fault in ("raised", "nonsense", "too_slow", "ended")
)
PROBE_LIMIT_S = 5.0
KERNEL_LIMIT_S = 60.0  # of the import of a kernel's modules, which may load large libraries


class PluginFault(NSAError):
    """A function of a plugin failed.

    Attributes:
        fault: "raised", "nonsense" (an invalid result), "too_slow" or "ended" (its process).
    """

    def __init__(self, message: str, fault: str) -> None:
        super().__init__(message, fault)
        self.fault = fault

    def __str__(self) -> str:
        return str(self.args[0])


def load_in_child(plugin: Plugin, child: Child) -> None:
    """Let ``child`` load a plugin; :func:`loaded_entries` returns its backends."""
    child.send(_with_reports, load, (plugin,))


def loaded_entries(child: Child, limit_s: float) -> list[BackendEntry]:
    """Return the backends that ``child`` has loaded.

    Raises:
        ChildEnded: The child ended, or did not load them in time.
    """
    entries: list[BackendEntry] = _reported(child.receive(limit_s, "while loading"))
    return entries


def ask(entry: BackendEntry, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(entry.name, guarded, *arguments)``, called where the plugin runs.

    Args:
        entry: The backend; ``guarded`` says whether the state must be guarded.
        what: The function of the plugin, for messages: "probe", "rank function", ...
        function: One of this module: :func:`call_probe`, :func:`call_rank`, ...
        arguments: The others.

    Raises:
        PluginFault: The function of the plugin failed, or its process ended.
    """
    guarded = not entry.first_party
    if entry.child is None:
        return function(entry.name, guarded, *arguments)
    limit_s = KERNEL_LIMIT_S if function is import_kernel else PROBE_LIMIT_S
    call = (_with_reports, function, (entry.name, guarded, *arguments))
    try:
        return _reported(entry.child.call(*call, limit_s=limit_s, doing=f"in its {what}"))
    except ChildEnded as ended:
        raise PluginFault(ended.how, "too_slow" if ended.hung else "ended") from ended


def call_probe(name: str, guarded: bool, path: str, request: Request) -> tuple[Reason, ...]:
    """Return the reasons of a probe."""
    result = _call(name, guarded, "probe", path, request)
    if not isinstance(result, (list, tuple)):
        text = f"its probe returned {type(result).__name__}, not a list of Reasons"
        raise PluginFault(text, "nonsense")
    for index, reason in enumerate(result):
        if not is_reason(reason):
            kind = type(reason).__name__
            text = f"item {index} of its probe's list is {kind}, not a Reason with code and message"
            raise PluginFault(text, "nonsense")
    return tuple(result)


def call_rank(name: str, guarded: bool, path: str, request: Request) -> Rank:
    """Return the rank that a rank function gives."""
    rank = _call(name, guarded, "rank", path, request)
    value, why = rank if type(rank) is Rank else (rank, "")
    if type(value) is not int or type(why) is not str:
        text = f"its rank returned {type(rank).__name__}, not an integer or a Rank"
        raise PluginFault(text, "nonsense")
    return Rank(value, why)


def call_detail(name: str, guarded: bool, path: str) -> list[str]:
    """Return the lines of a detail function."""
    lines = _call(name, guarded, "detail function", path)
    if not isinstance(lines, (list, tuple)):
        text = f"its detail function returned {type(lines).__name__}, not a list of texts"
        raise PluginFault(text, "nonsense")
    return [str(line) for line in lines]


def import_kernel(name: str, guarded: bool, *paths: str) -> None:
    """Import the functions of a kernel; raises what their modules raise, described."""
    try:
        for path in paths:
            import_function(name, path)
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise PluginFault(describe_error(error), "raised") from error


def _call(name: str, guarded: bool, what: str, path: str, *arguments: Any) -> Any:
    """Import the function that ``path`` names, and return its result for ``arguments``."""
    guard: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if is_new(path):
        guard = loading(name)
    elif guarded:
        guard = loading(name, SETTINGS)
    try:
        with guard:
            function = import_function(name, path)
            return call_function((name, path, "plugin"), function, arguments, {})
    except BaseException as error:  # a plugin may raise anything
        if is_ctrl_c(error):
            raise
        raise PluginFault(f"its {what} raised {describe_error(error)}", "raised") from error


def _with_reports(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return the result of a function, and the changes of the state; in a child process."""
    try:
        return function(*arguments), take_reports()
    except PluginFault as fault:
        return fault, take_reports()


def _reported(answer: tuple[Any, list[str]]) -> Any:
    """Log the changes of the state in a child process; return the result, or raise its fault."""
    result, reports = answer
    for text in reports:
        report_change(text)
    if isinstance(result, PluginFault):
        raise result
    return result
