"""Which backends there are: discovery, what the user switched off, and names claimed twice. No
torch here.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import defaultdict
from collections.abc import Iterable

from nsa_core.contract import BackendSpec, Reason
from nsa_core.dispatch import trial as isolation
from nsa_core.dispatch.loading import (
    FIRST_PARTY,
    BackendEntry,
    Plugin,
    failed,
    installed,
    load,
    load_spec,
    normalized,
)
from nsa_core.errors import InvalidInput
from nsa_core.util.text import did_you_mean, one_line

__all__ = [
    "BackendEntry",
    "Registry",
    "default_registry",
    "disabled_reason",
    "discover",
    "mark_conflicts",
]


@dataclasses.dataclass(frozen=True)
class Registry:
    """The known backends, usable or not, in the order of their names. Immutable."""

    entries: tuple[BackendEntry, ...] = ()

    def __post_init__(self) -> None:
        ordered = sorted(
            mark_conflicts(self.entries),
            key=lambda e: (e.name, e.status == "disabled", e.distribution),
        )
        object.__setattr__(self, "entries", tuple(ordered))

    def names(self) -> tuple[str, ...]:
        """Every known name, whatever its status."""
        return tuple(dict.fromkeys(entry.name for entry in self.entries))

    def ready(self) -> tuple[BackendEntry, ...]:
        """The entries that may run."""
        return tuple(entry for entry in self.entries if entry.status == "ready")

    def get(self, name: str) -> BackendEntry:
        """The entry called ``name``; of several, one that is not disabled.

        Raises:
            InvalidInput: no backend has this name; the message suggests a close one and lists all.
        """
        for entry in self.entries:
            if entry.name == name:
                return entry
        known = self.names()
        listed = ", ".join(map(one_line, known)) or "none, no backend is installed"
        raise InvalidInput(f"unknown backend {name!r}{did_you_mean(name, known)} (known: {listed})")

    def with_backend(
        self, spec: BackendSpec, version: str = "0", distribution: str = "in-process"
    ) -> Registry:
        """A registry that also holds ``spec``, checked as a plugin's would be; for tests and
        experiments.
        """
        return Registry((*self.entries, load_spec(spec, version, distribution)))


def mark_conflicts(entries: Iterable[BackendEntry]) -> list[BackendEntry]:
    """Entries whose name another enabled entry claims too become broken: nobody is silently
    preferred, not even us.
    """
    claims = defaultdict(list)
    for entry in entries:
        claims[normalized(entry.name), entry.status == "disabled"].append(entry)
    result = []
    for (_, disabled), group in claims.items():
        if disabled or len(group) == 1:
            result += group
            continue
        claimants = " and ".join(
            one_line(f"{e.distribution} {e.version} ({e.name} = {e.entry_point})") for e in group
        )
        text = f"the name {group[0].name!r} is claimed by {claimants}"
        reason = Reason(
            "name_conflict",
            text,
            "uninstall one of them, or name its distribution in NSA_DISABLE_PLUGINS",
        )
        result += [
            dataclasses.replace(entry, status="broken", reason=reason, spec=None) for entry in group
        ]
    return result


def _names_in(listed: str) -> set[str]:
    return {normalized(name.strip()) for name in listed.split(",") if name.strip()}


def disabled_reason(plugin: Plugin, safe: bool = False) -> Reason | None:
    """Why the user does not want ``plugin``; None: it may be loaded.

    NSA_PLUGINS lists, by entry-point or distribution name and separated by commas, the plugins to
    load beside this project's own; empty means none. NSA_DISABLE_PLUGINS lists plugins not to load,
    this project's own included; "1" or "all" means all but this project's own, "" and "0" none.
    ``safe`` loads this project's own only.
    """
    names = {normalized(plugin.name), normalized(plugin.distribution)}
    refused = _names_in(os.environ.get("NSA_DISABLE_PLUGINS", "")) - {"0"}
    if names & refused:
        return Reason(
            "disabled", "named in NSA_DISABLE_PLUGINS", "take it out of NSA_DISABLE_PLUGINS"
        )
    if plugin.first_party:
        return None
    if safe:
        return Reason(
            "disabled", f"safe mode loads only {', '.join(FIRST_PARTY)}", "leave safe mode"
        )
    if refused & {"1", "all"}:
        return Reason(
            "disabled",
            "NSA_DISABLE_PLUGINS refuses all third-party plugins",
            "unset NSA_DISABLE_PLUGINS",
        )
    allowed = os.environ.get("NSA_PLUGINS")
    if allowed is not None and not names & _names_in(allowed):
        return Reason("disabled", "not in NSA_PLUGINS", "add it to NSA_PLUGINS")
    return None


def discover(
    *, isolate: bool = False, safe: bool = False, limit_s: float = isolation.LIMIT_S
) -> Registry:
    """Load every installed plugin, each in its own guard.

    With ``isolate``, a third-party plugin is first loaded in a child process, for ``limit_s``
    seconds at most, and here only if it survived that; a crash remembered from an earlier such run
    is honoured in any case. ``safe`` loads this project's own plugins only.
    """
    plugins = installed()
    disabled = {p: reason for p in plugins if (reason := disabled_reason(p, safe))}
    foreign = [p for p in plugins if p not in disabled and not p.first_party and p.value]
    crashed = isolation.crashed(foreign, limit_s) if isolate else isolation.remembered(foreign)
    entries = []
    for plugin in plugins:
        if plugin in disabled:
            entries.append(failed(plugin, "disabled", disabled[plugin]))
        elif plugin in crashed:
            entries.append(failed(plugin, "broken", crashed[plugin]))
        else:
            entries += load(plugin)
    return Registry(tuple(entries))


_default: Registry | None = None
_lock = threading.Lock()


def default_registry() -> Registry:
    """What :func:`discover` finds, once per process; several threads asking first get one
    answer.
    """
    global _default
    with _lock:
        if _default is None:
            _default = discover()
        return _default
