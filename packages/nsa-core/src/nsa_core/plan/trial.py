"""Trials: load third-party plugins in child processes, so that a crash or hang ends only the child.

A child loads one plugin and calls its probe with a simple request.

The outcome is cached in the user's cache directory by distribution version, entry point and Python
version. A change of the plugin's files or of the installed torch invalidates it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa_core.contract import Reason, Request, import_named
from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_core.plan.loading import BackendEntry, Plugin, load
from nsa_core.util.atomic_files import user_cache, write_atomic

LIMIT_S = 20.0
_PROBE_S = 5.0  # equals nsa_core.plan.probing.PROBE_LIMIT_S
_MAX_CHILDREN = 8
# The child reports survival by this exit status. A pipe would stay open if a process that the
# plugin started outlived the child.
_SURVIVED = 86
_SCHEMA = 3  # outcomes of schema 2 did not include the names of the backends


@dataclasses.dataclass(frozen=True)
class Trial:
    """The outcome of loading one plugin in a child process.

    Attributes:
        reason: Why the child did not survive; None if it did.
        limit_s: Time limit of the child, in seconds.
        names: Names of the backends that it registered before it crashed or hung, if it did.
    """

    reason: Reason | None
    limit_s: float
    names: tuple[str, ...] = ()


def failed_trials(plugins: Sequence[Plugin], limit_s: float = LIMIT_S) -> dict[Plugin, Trial]:
    """Load and probe each plugin in a child process, and return the ones that crash or hang.

    Several children run at once. A cached outcome replaces a child. A plugin that only raises an
    exception counts as survived: loading it in this process reports the exception.

    Args:
        plugins: The plugins to try.
        limit_s: Time limit of each child, in seconds.

    Returns:
        plugin -> its trial, for each plugin that did not survive.
    """
    cached = _read_cached(plugins)
    # A hang under a shorter limit does not imply a hang under this one.
    stale = [
        p
        for p, trial in cached.items()
        if trial.reason is not None and trial.reason.code == "hangs" and trial.limit_s < limit_s
    ]
    untried = [p for p in plugins if p not in cached or p in stale]
    fresh = _try_all(untried, limit_s)
    if fresh:
        _write_cached(fresh)
    trials = {**cached, **fresh}
    return {p: trial for p, trial in trials.items() if trial.reason is not None}


def cached_failures(plugins: Sequence[Plugin]) -> dict[Plugin, Trial]:
    """Return the plugins with a cached crash or hang, and the trial of each. Starts no child."""
    cached = _read_cached(plugins)
    return {p: trial for p, trial in cached.items() if trial.reason is not None}


def _try_all(plugins: Sequence[Plugin], limit_s: float) -> dict[Plugin, Trial]:
    """Try every plugin, up to _MAX_CHILDREN at a time, and kill all children at the end."""
    waiting, trials, files = list(plugins), dict[Plugin, Trial](), dict[Plugin, Path]()
    running: dict[Plugin, tuple[subprocess.Popen[bytes], float]] = {}
    folder = Path(tempfile.mkdtemp(prefix="nsa-")) if waiting else None
    try:
        while waiting or running:
            while waiting and len(running) < _MAX_CHILDREN:
                plugin = waiting.pop(0)
                assert folder is not None  # plugins are waiting
                files[plugin] = folder / str(len(files))
                running[plugin] = (_start(plugin, files[plugin]), time.monotonic() + limit_s)
            for plugin, (child, deadline) in list(running.items()):
                status = child.poll()
                if status is None and time.monotonic() < deadline:
                    continue
                del running[plugin]
                kill_child(child)
                reason = _reason(status, limit_s)
                names = _registered_names(files[plugin]) if reason else ()
                trials[plugin] = Trial(reason, limit_s, names)
            time.sleep(0.005)
    finally:
        for child, _ in running.values():
            kill_child(child)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return trials


def _registered_names(file: Path) -> tuple[str, ...]:
    """Return the names that a child wrote to ``file``, or none."""
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    return tuple(name for name in names if isinstance(name, str))


def _start(plugin: Plugin, names: Path) -> subprocess.Popen[bytes]:
    """Start the child of ``plugin``, which writes the names of its backends to ``names``."""
    # The child takes over this process's sys.path before it imports anything. The path is part of
    # the code, so that no environment variable is needed.
    path = [entry for entry in sys.path if isinstance(entry, str)]
    code = (
        f"import sys; sys.path[:] = {path!r}\nfrom nsa_core.plan.trial import"
        " _child\n_child(*sys.argv[1:])"
    )
    return start_child([code, plugin.name, plugin.value, str(names)])


def start_child(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a child process that runs ``arguments[0]`` as Python code, with its output discarded.

    :func:`kill_child` kills the child and the processes that it started.
    """
    return subprocess.Popen(
        [sys.executable, "-c", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a process group, which kill_child() kills with everything in it
    )


def kill_child(child: subprocess.Popen[bytes]) -> None:
    """Kill ``child`` and its process group, and wait for ``child``."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()


def _child(name: str, value: str, names: str) -> None:
    """Run in the child process: load the plugin, call its probe, and exit with _SURVIVED."""
    # A Ctrl-C does not reach the child; a KeyboardInterrupt here is raised by the plugin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError):
        import resource

        # Crashes are expected in a trial, so the child writes no core file.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    entries = load(Plugin(name, "", "", value))
    Path(names).write_text(json.dumps([entry.name for entry in entries]), encoding="utf-8")
    probing = threading.Thread(target=_probe_slots, args=(entries,), daemon=True)
    probing.start()
    probing.join(_PROBE_S)
    os._exit(_SURVIVED)  # exits even if the plugin's threads are still running


def _probe_slots(entries: Sequence[BackendEntry]) -> None:
    """Call the probes with a simple request for each slot, and ignore results and exceptions.

    :mod:`nsa_core.plan.probing` evaluates them later, in the caller's process.
    """
    geometry = BlockGeometry()
    for spec in (entry.spec for entry in entries if entry.spec is not None):
        for slot in spec.slots:
            with contextlib.suppress(BaseException):
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
    return failure_reason(status, limit_s, "while loading or probing", _hint())


def failure_reason(status: int | None, limit_s: float, doing: str, hint: str) -> Reason | None:
    """Return why a child did not survive, or None if it did.

    Args:
        status: Return code of the child; None if it was killed at its time limit.
        limit_s: Time limit of the child, in seconds.
        doing: What the child did, such as "while loading".
        hint: Hint of the reason.
    """
    if status == _SURVIVED:
        return None
    if status is None:
        return Reason(
            "hangs", f"did not finish within {limit_s:g} s in a child process {doing}", hint
        )
    return Reason("crashes" if status < 0 else "exits", describe_exit(status, doing), hint)


def describe_exit(status: int, doing: str) -> str:
    """Describe how a process ended, from its return code (negative: the number of a signal)."""
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
    """Return the file of cached outcomes: ``nsa/plugins.json`` in XDG_CACHE_HOME or ~/.cache."""
    return user_cache() / "plugins.json"


def _key(plugin: Plugin) -> str:
    python = f"{sys.implementation.name} {'.'.join(map(str, sys.version_info[:3]))}"
    return f"{plugin.distribution} {plugin.version} {plugin.name}={plugin.value} {python}"


def _stamp(plugin: Plugin) -> str:
    """Return a text that changes with the files of the plugin's top package and with torch.

    The package is located but not imported.
    """
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    try:
        spec = importlib.util.find_spec(plugin.value.partition(":")[0].partition(".")[0])
        locations = list(spec.submodule_search_locations or [spec.origin or ""]) if spec else []
        files = [
            f
            for p in locations
            for f in (Path(p).iterdir() if os.path.isdir(p) else [Path(p)])
            if f.is_file()
        ]
        newest = max((f.stat().st_mtime_ns for f in files), default=0)
    except Exception:  # noqa: BLE001  a plugin may install its own finder
        locations, newest = [], 0
    return f"torch {torch}, {locations}, {newest}"


def _read() -> dict[str, Any]:
    """Return all cached outcomes by key; {} if the file is missing, unreadable or invalid."""
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


def _read_cached(plugins: Sequence[Plugin]) -> dict[Plugin, Trial]:
    """Return the cached outcome of each plugin that has a valid one."""
    if not plugins:
        return {}
    stored, trials = _read(), dict[Plugin, Trial]()
    for plugin in plugins:
        item = stored.get(_key(plugin))
        if not isinstance(item, dict) or item.get("stamp") != _stamp(plugin):
            continue
        limit, reason, names = item.get("limit_s"), item.get("reason"), item.get("names")
        if not isinstance(limit, (int, float)) or not isinstance(names, list):
            continue
        if reason is None:
            trials[plugin] = Trial(None, limit)
        elif (
            isinstance(reason, list)
            and len(reason) == 2
            and all(isinstance(text, str) for text in reason)
        ):
            trials[plugin] = Trial(
                Reason(reason[0], reason[1], _hint()), limit, tuple(map(str, names))
            )
    return trials


def _write_cached(trials: dict[Plugin, Trial]) -> None:
    """Add ``trials`` to the cache file."""
    stored = _read()
    for plugin, trial in trials.items():
        reason = [trial.reason.code, trial.reason.message] if trial.reason else None
        stored[_key(plugin)] = {
            "stamp": _stamp(plugin),
            "limit_s": trial.limit_s,
            "reason": reason,
            "names": trial.names,
        }
    text = json.dumps({"schema": _SCHEMA, "verdicts": stored}, indent=1, sort_keys=True)
    # If the file cannot be written, the next call only starts the children again.
    with contextlib.suppress(OSError, InvalidInput):
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        write_atomic(cache_file(), text, force=True)
