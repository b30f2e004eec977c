"""The registry: discover backends, leave out disabled ones, detect name conflicts. No torch."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Iterable

from nsa_core.contract import SLOTS, BackendSpec, Reason
from nsa_core.errors import InvalidInput
from nsa_core.plan.loading import (
    FIRST_PARTY,
    BackendEntry,
    Plugin,
    entry_without_spec,
    installed,
    load,
    load_spec,
    normalized,
)
from nsa_core.plan.plugin_calls import load_in_child, loaded_entries
from nsa_core.util.child import Child, ChildEnded
from nsa_core.util.planning_lock import planning_lock
from nsa_core.util.text import did_you_mean, one_line

LOAD_LIMIT_S = 10.0


@dataclasses.dataclass(frozen=True)
class Registry:
    """The known backends, usable or not, sorted by name. Immutable."""

    entries: tuple[BackendEntry, ...] = ()

    def __post_init__(self) -> None:
        ordered = sorted(
            _mark_conflicts(self.entries),
            key=lambda e: (e.name, e.status == "disabled", e.distribution),
        )
        object.__setattr__(self, "entries", tuple(ordered))

    def names(self) -> tuple[str, ...]:
        """Return the names of all backends, usable or not."""
        return tuple(dict.fromkeys(entry.name for entry in self.entries))

    def ready(self) -> tuple[BackendEntry, ...]:
        """Return the entries whose status is "ready"."""
        return tuple(entry for entry in self.entries if entry.status == "ready")

    def get(self, name: str) -> BackendEntry:
        """Return the entry called ``name``; if several have the name, an enabled one.

        Raises:
            InvalidInput: No backend has this name. The message suggests a similar name and lists
                all.
        """
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise InvalidInput(*self.unknown([name]))

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return a sentence about each of ``names`` that no backend has."""
        known = self.names()
        all_names = ", ".join(map(one_line, known)) or "none, no backend is installed"
        return [
            f"unknown backend {name!r}{did_you_mean(name, known)} (known: {all_names})"
            for name in dict.fromkeys(names)
            if name not in known
        ]

    def with_backend(
        self, spec: BackendSpec, version: str = "0", distribution: str = "in-process"
    ) -> Registry:
        """Return a registry that also holds ``spec``, for tests and experiments.

        The spec is checked like one from an installed plugin.
        """
        return Registry((*self.entries, load_spec(spec, version, distribution)))


def _mark_conflicts(entries: Iterable[BackendEntry]) -> list[BackendEntry]:
    """Return ``entries``, with enabled entries that share a name marked as broken.

    No distribution takes precedence, not even one of this project.
    """
    by_name = defaultdict(list)
    for entry in entries:
        by_name[normalized(entry.name), entry.status == "disabled"].append(entry)
    result = []
    for (_, disabled), group in by_name.items():
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


def _names_in(text: str) -> set[str]:
    return {normalized(name.strip()) for name in text.split(",") if name.strip()}


def disabled_reason(plugin: Plugin, safe: bool = False) -> Reason | None:
    """Return why ``plugin`` is disabled, or None if it may be loaded.

    Two environment variables hold comma-separated names of entry points or distributions:

    - NSA_PLUGINS lists the third-party plugins to load; if it is set but empty, none is loaded.
    - NSA_DISABLE_PLUGINS lists the plugins not to load, which may include this project's own. "1"
      or "all" disables all third-party plugins; "" and "0" disable none.

    ``safe`` disables all third-party plugins.
    """
    names = {normalized(plugin.name), normalized(plugin.distribution)}
    refused = _names_in(os.environ.get("NSA_DISABLE_PLUGINS", "")) - {"0"}
    if names & refused:
        return Reason(
            "disabled", "named in NSA_DISABLE_PLUGINS", "remove it from NSA_DISABLE_PLUGINS"
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
            "NSA_DISABLE_PLUGINS disables all third-party plugins",
            "unset NSA_DISABLE_PLUGINS",
        )
    allowed = os.environ.get("NSA_PLUGINS")
    if allowed is not None and not names & _names_in(allowed):
        return Reason("disabled", "not in NSA_PLUGINS", "add it to NSA_PLUGINS")
    return None


def third_party_plugins(safe: bool = False) -> list[Plugin]:
    """Return the installed third-party plugins that are not disabled. Reads metadata only."""
    plugins = [p for p in installed() if p.entry_point and not p.first_party]
    return [p for p in plugins if disabled_reason(p, safe) is None]


def discover(
    *, isolate: bool = False, safe: bool = False, limit_s: float = LOAD_LIMIT_S
) -> Registry:
    """Load every installed plugin apart from the others.

    Args:
        isolate: Load and call each third-party plugin in a child process of its own. One that
            crashes, exits or hangs is "broken".
        safe: Load only this project's own plugins.
        limit_s: Seconds until a plugin that loads in a child process counts as hanging.
    """
    plugins = installed()
    children: dict[Plugin, Child] = {}
    for plugin in third_party_plugins(safe) if isolate else ():
        children[plugin] = Child(f"plugin {one_line(plugin.name)!r}")
        load_in_child(plugin, children[plugin])
    entries = []
    for plugin in plugins:
        if reason := disabled_reason(plugin, safe):
            entries.append(entry_without_spec(plugin, "disabled", reason))
        elif plugin in children:
            entries += _entries_in_child(plugin, children[plugin], limit_s)
        else:
            entries += load(plugin)
    return Registry(tuple(entries))


def _entries_in_child(plugin: Plugin, child: Child, limit_s: float) -> list[BackendEntry]:
    """Return the backends of a plugin that ``child`` loads."""
    try:
        entries = loaded_entries(child, limit_s)
    except ChildEnded as ended:
        code, hint = "hangs" if ended.hung else "ended", plugin.report_hint
        return [entry_without_spec(plugin, "broken", Reason(code, ended.how, hint))]
    return [dataclasses.replace(e, child=child if e.spec else None) for e in entries]


@functools.lru_cache(maxsize=8)  # programs that change sys.path
def _installed_names(path: tuple[str, ...]) -> frozenset[str]:
    """Return the names of all entry points that ``path``, a copy of sys.path, leads to."""
    return frozenset(plugin.name for plugin in installed())


def check_backend_names(names: Iterable[str]) -> None:
    """Check that every name is one of a backend, usable or not.

    The name of an installed entry point is accepted from its metadata. Only another name makes
    this function load the plugins: a plugin may register a backend under a name of its own.

    Raises:
        InvalidInput: No backend has a name. The message names each, suggests a similar name and
            lists all.
    """
    unseen = sorted({*names} - _installed_names(tuple(map(str, sys.path))))
    if unseen and (problems := default_registry().unknown(unseen)):
        raise InvalidInput("; ".join(problems))


def named_backends(text: str) -> dict[str, str]:
    """Return the backend of each slot that ``text`` names, without checking the backends.

    Args:
        text: "sdpa" (in every slot), pairs such as "win=sdpa,cmp=fa2", or "auto" (none).

    Raises:
        InvalidInput: ``text`` is empty, is neither a name nor pairs, has an unknown slot, or names
            a slot twice.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    if len(items) == 1 and "=" not in items[0]:
        return {} if items[0] == "auto" else dict.fromkeys(SLOTS, items[0])
    backends: dict[str, str] = {}
    for item in items or [""]:
        slot, _, name = (part.strip() for part in item.partition("="))
        if not name:
            raise InvalidInput(
                "backends must be a name, or slot=name pairs such as win=sdpa,cmp=fa2, got"
                f" {text!r}"
            )
        if slot not in SLOTS:
            raise InvalidInput(
                f"backends {text!r}: unknown slot {slot!r}{did_you_mean(slot, SLOTS)} (known:"
                f" {', '.join(SLOTS)})"
            )
        if slot in backends:
            raise InvalidInput(f"backends {text!r} names slot {slot!r} twice")
        backends[slot] = name
    return backends


_default: Registry | None = None


def default_registry() -> Registry:
    """Return the registry from :func:`discover`, built once per process, for all threads."""
    global _default
    with planning_lock:
        if _default is None:
            _default = discover()
        return _default
