"""Third-party plugins tried in a child process first: a crash or a hang of one must not take the
caller with it.

A child loads the plugin and puts a plain request to its probe.

The verdict is remembered in the user's cache directory, per distribution version, entry point and
Python version, and dropped when the plugin's files or the installed torch change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa_core.contract import Reason, Request, import_named
from nsa_core.dispatch.loading import BackendEntry, Plugin, load
from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_core.util.atomic_files import user_cache, write_atomic

LIMIT_S = 20.0
_PROBE_S = 5.0  # a probe that takes longer is given up here, and by nsa_core.dispatch.candidates
_AT_ONCE = 8
# exit status; no pipe, because a grandchild that outlives the child would keep a pipe open
_SURVIVED = 86
_SCHEMA = 2  # 1: probes were not asked


@dataclasses.dataclass(frozen=True)
class Trial:
    """What became of one plugin in a child process."""

    reason: Reason | None  # None: it survived
    limit_s: float


def crashed(plugins: Sequence[Plugin], limit_s: float = LIMIT_S) -> dict[Plugin, Reason]:
    """The plugins that do not survive loading and probing in a child process, with what became of
    each.

    Several children run at once, ``limit_s`` bounds each, and a remembered verdict takes the place
    of a child. A plugin that merely raises survives: loading it here tells the reason.
    """
    known = _recall(plugins)
    # A hang under a shorter limit than this one says nothing about this one.
    stale = [
        p
        for p, v in known.items()
        if v.reason is not None and v.reason.code == "hangs" and v.limit_s < limit_s
    ]
    todo = [p for p in plugins if p not in known or p in stale]
    fresh = _try_all(todo, limit_s)
    if fresh:
        _remember(fresh)
    verdicts = {**known, **fresh}
    return {p: v.reason for p, v in verdicts.items() if v.reason is not None}


def remembered(plugins: Sequence[Plugin]) -> dict[Plugin, Reason]:
    """The plugins known from an earlier :func:`crashed` not to survive; starts nothing."""
    return {p: v.reason for p, v in _recall(plugins).items() if v.reason is not None}


def _try_all(plugins: Sequence[Plugin], limit_s: float) -> dict[Plugin, Trial]:
    waiting, verdicts = list(plugins), dict[Plugin, Trial]()
    running: dict[Plugin, tuple[subprocess.Popen[bytes], float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                plugin = waiting.pop(0)
                running[plugin] = (_start(plugin), time.monotonic() + limit_s)
            for plugin, (child, deadline) in list(running.items()):
                status = child.poll()
                if status is None and time.monotonic() < deadline:
                    continue
                del running[plugin]
                end(child)
                verdicts[plugin] = Trial(_reason(status, limit_s), limit_s)
            time.sleep(0.005)
    finally:
        for child, _ in running.values():
            end(child)
    return verdicts


def _start(plugin: Plugin) -> subprocess.Popen[bytes]:
    # The caller's own path, set before anything is imported; an argument, so that no environment
    # variable is needed.
    path = [entry for entry in sys.path if isinstance(entry, str)]
    code = (
        f"import sys; sys.path[:] = {path!r}\nfrom nsa_core.dispatch.trial import"
        " _child\n_child(*sys.argv[1:])"
    )
    return start([code, plugin.name, plugin.value])


def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """A silent child that runs ``arguments[0]`` as Python; it and what it starts are ended by
    :func:`end`.
    """
    return subprocess.Popen(
        [sys.executable, "-c", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that what the plugin started can be ended with it
    )


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill ``child`` with its process group, and wait for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()


def _child(name: str, value: str) -> None:
    """Body of the child process: load the plugin, ask it, and leave with the status that says it
    survived.
    """
    with contextlib.suppress(ImportError):
        import resource

        # a crash here is a finding, not a case for a core file
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asking = threading.Thread(target=_ask, args=(load(Plugin(name, "", "", value)),), daemon=True)
    asking.start()
    asking.join(_PROBE_S)
    os._exit(_SURVIVED)  # threads that the plugin started do not keep the child


def _ask(entries: Sequence[BackendEntry]) -> None:
    """Put a plain request of each slot to the probes; what they answer, or raise, is for whoever
    asks in earnest.
    """
    geometry = BlockGeometry()
    for spec in (entry.spec for entry in entries if entry.spec is not None):
        for slot in spec.slots:
            with contextlib.suppress(Exception, SystemExit):
                import_named(spec.probe)(
                    Request(
                        slot=slot,
                        geometry=geometry,
                        n_heads=12,
                        n_kv_heads=2,
                        head_dim=64,
                        v_head_dim=64,
                    )
                )


def _reason(status: int | None, limit_s: float) -> Reason | None:
    return ended(status, limit_s, "while loading or probing", _hint())


def ended(status: int | None, limit_s: float, doing: str, hint: str) -> Reason | None:
    """Why a child that ended with ``status`` (None: killed at its limit) did not survive; None: it
    did.
    """
    if status == _SURVIVED:
        return None
    if status is None:
        return Reason(
            "hangs", f"did not finish within {limit_s:g} s in a child process {doing}", hint
        )
    return Reason("crashes" if status < 0 else "exits", fate(status, doing), hint)


def fate(status: int, doing: str) -> str:
    """What a process that left with ``status`` (negative: a signal's number) did, ``doing``
    something.
    """
    if status >= 0:
        return f"ended its process with exit status {status} {doing}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"killed its process with {name} {doing}"


def _hint() -> str:
    return f"reinstall or upgrade it; delete {cache_file()} to try again"


def cache_file() -> Path:
    """Where verdicts are remembered: ``nsa/plugins.json`` under XDG_CACHE_HOME or ~/.cache."""
    return user_cache() / "plugins.json"


def _key(plugin: Plugin) -> str:
    python = f"{sys.implementation.name} {'.'.join(map(str, sys.version_info[:3]))}"
    return f"{plugin.distribution} {plugin.version} {plugin.name}={plugin.value} {python}"


def _stamp(plugin: Plugin) -> str:
    """Changes when the plugin's top package (found, not imported) or the installed torch does."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    try:
        spec = importlib.util.find_spec(plugin.value.partition(":")[0].partition(".")[0])
        places = list(spec.submodule_search_locations or [spec.origin or ""]) if spec else []
        files = [
            f
            for p in places
            for f in (Path(p).iterdir() if os.path.isdir(p) else [Path(p)])
            if f.is_file()
        ]
        newest = max((f.stat().st_mtime_ns for f in files), default=0)
    except Exception:  # noqa: BLE001  a plugin may install its own finder
        places, newest = [], 0
    return f"torch {torch}, {places}, {newest}"


def _read() -> dict[str, Any]:
    """Everything remembered, by key; a file that is missing, unreadable or not ours counts as
    empty.
    """
    try:
        document = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    verdicts = (
        document.get("verdicts")
        if isinstance(document, dict) and document.get("schema") == _SCHEMA
        else None
    )
    return verdicts if isinstance(verdicts, dict) else {}


def _recall(plugins: Sequence[Plugin]) -> dict[Plugin, Trial]:
    if not plugins:
        return {}
    stored, found = _read(), dict[Plugin, Trial]()
    for plugin in plugins:
        item = stored.get(_key(plugin))
        if not isinstance(item, dict) or item.get("stamp") != _stamp(plugin):
            continue
        limit, reason = item.get("limit_s"), item.get("reason")
        if not isinstance(limit, (int, float)):
            continue
        if reason is None:
            found[plugin] = Trial(None, limit)
        elif (
            isinstance(reason, list)
            and len(reason) == 2
            and all(isinstance(text, str) for text in reason)
        ):
            found[plugin] = Trial(Reason(reason[0], reason[1], _hint()), limit)
    return found


def _remember(verdicts: dict[Plugin, Trial]) -> None:
    stored = _read()
    for plugin, verdict in verdicts.items():
        reason = [verdict.reason.code, verdict.reason.message] if verdict.reason else None
        stored[_key(plugin)] = {
            "stamp": _stamp(plugin),
            "limit_s": verdict.limit_s,
            "reason": reason,
        }
    text = json.dumps({"schema": _SCHEMA, "verdicts": stored}, indent=1, sort_keys=True)
    # A cache that cannot be written costs a child process next time, nothing more.
    with contextlib.suppress(OSError, InvalidInput):
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        write_atomic(cache_file(), text, force=True)
