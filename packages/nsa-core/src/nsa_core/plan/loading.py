"""Find the installed plugins by their metadata, and load each one alone. Imports no torch.

Plain pluggy stops at the first plugin that fails to load. Here every entry point has its own pluggy
manager, its own exception handling and its own status.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pluggy

from nsa_core.contract import (
    API_VERSION,
    ENTRY_POINT_GROUP,
    FUSED,
    PROJECT,
    SLOTS,
    BackendSpec,
    Hooks,
    Reason,
    SlotSpec,
    Unavailable,
)
from nsa_core.util.child import Child
from nsa_core.util.global_state import loading
from nsa_core.util.interruption import is_ctrl_c
from nsa_core.util.text import describe_error, one_line

FIRST_PARTY = ("nsa-backend-sdpa", "nsa-backend-triton", "nsa-backend-fa2")
STATUSES = ("ready", "unavailable", "incompatible", "broken", "disabled")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def normalized(name: str) -> str:
    """Return ``name`` in lower case, with "-" for each run of "-", "_" and ".".

    Names that normalize alike count as one, as for distributions and operator namespaces.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def is_first_party(distribution: str) -> bool:
    """Return whether ``distribution`` is one of this project's own backends."""
    return normalized(distribution) in FIRST_PARTY


def report_hint(distribution: str) -> str:
    """Return a hint where to report a fault in a backend of ``distribution``."""
    if is_first_party(distribution):
        return (
            "this is a bug in NSA itself: please report it with the output of `nsa doctor --report`"
        )
    return "report it to the plugin's author"


@dataclasses.dataclass(frozen=True)
class Plugin:
    """An entry point of group ``nsa.backends``, from the metadata of its distribution."""

    name: str
    distribution: str
    version: str
    value: str  # "module" or "module:attribute"

    @property
    def first_party(self) -> bool:
        """Whether the distribution is one of this project's own."""
        return is_first_party(self.distribution)


@dataclasses.dataclass(frozen=True)
class BackendEntry:
    """A backend in the registry, usable or not.

    Attributes:
        name: Name of the backend.
        distribution: Name of the distribution that provides it.
        version: Version of that distribution.
        status: One of STATUSES.
        reason: Why the backend cannot be used; None if its status is "ready".
        spec: The specification that it registered; None unless its status is "ready".
        entry_point: "module" or "module:attribute".
        first_party: Whether the distribution is one of this project's own.
        child: The process in which its code runs; None: this one. It is not pickled.
    """

    name: str
    distribution: str
    version: str
    status: str
    reason: Reason | None
    spec: BackendSpec | None
    entry_point: str
    first_party: bool
    child: Child | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def title(self) -> str:
        """Name and version, for messages."""
        return f"{one_line(self.name)} {one_line(self.version)}"


def installed() -> list[Plugin]:
    """Return every installed plugin, sorted by name. Reads metadata only and imports nothing.

    If a distribution is on the path twice, the first copy counts, as for imports. A distribution
    whose entry points cannot be read becomes a Plugin with an empty value, which :func:`load`
    reports as broken.
    """
    plugins: dict[tuple[str, str, str], Plugin] = {}
    first_position: dict[str, int] = {}  # distribution -> where on the path it occurs first
    for position, dist in enumerate(importlib.metadata.distributions()):
        for plugin in _plugins_of(dist):
            if first_position.setdefault(normalized(plugin.distribution), position) == position:
                plugins.setdefault((plugin.distribution, plugin.name, plugin.value), plugin)
    return sorted(plugins.values(), key=lambda p: (p.name, p.distribution))


def _plugins_of(dist: importlib.metadata.Distribution) -> Iterator[Plugin]:
    try:
        text = dist.read_text("entry_points.txt") or ""
    except (OSError, UnicodeDecodeError):
        return
    if ENTRY_POINT_GROUP not in text:
        return
    try:
        name, version = str(dist.metadata["Name"] or "unknown"), str(dist.version or "unknown")
    except Exception:  # noqa: BLE001  the metadata of any distribution may be broken
        name, version = "unknown", "unknown"
    try:
        points = [(p.name, p.value) for p in dist.entry_points if p.group == ENTRY_POINT_GROUP]
    except Exception:  # noqa: BLE001  the metadata of any distribution may be broken
        points = [(name, "")]
    for point, value in points:
        yield Plugin(point, name, version, value)


def call_plugin(name: str, value: str) -> list[object]:
    """Import an entry point, call its hook, and return a flat list of the unchecked results.

    Raises whatever the plugin raises.
    """
    module = importlib.metadata.EntryPoint(name, value, ENTRY_POINT_GROUP).load()
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    manager.register(module, name=value)
    manager.check_pending()  # raises if the plugin implements a hook that nsa_core does not have
    results = []
    for result in manager.hook.nsa_register_backends(api_version=API_VERSION):
        results += list(result) if isinstance(result, (list, tuple)) else [result]
    return results


def load(plugin: Plugin) -> list[BackendEntry]:
    """Load ``plugin`` and return its backends, or one entry with the reason why loading failed.

    No exception of the plugin escapes. A missing third-party module makes the plugin "unavailable",
    because the user can install it. A missing module of the plugin itself or of nsa_core, and every
    other failed import, makes it "broken".
    """
    if not plugin.value:
        return [
            entry_without_spec(
                plugin,
                "broken",
                Reason("bad_metadata", "its entry points cannot be read", "reinstall it"),
            )
        ]
    try:
        with loading(plugin.name):
            results = call_plugin(plugin.name, plugin.value)
        entries = [_entry(plugin, result) for result in results]
    except pluggy.PluginValidationError as error:
        text = f"does not fit contract {_dotted(API_VERSION)}: {describe_error(error)}"
        return [
            entry_without_spec(
                plugin, "incompatible", Reason("stale_hook", text, "upgrade the plugin or nsa-core")
            )
        ]
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing and missing not in (
            plugin.value.partition(":")[0].partition(".")[0],
            "nsa_core",
        ):
            hint = f"install the package that provides {missing!r}"
            return [
                entry_without_spec(
                    plugin, "unavailable", Reason("dependency_missing", describe_error(error), hint)
                )
            ]
        return [
            entry_without_spec(
                plugin,
                "broken",
                Reason("import_failed", describe_error(error), "reinstall the plugin"),
            )
        ]
    except ImportError as error:
        return [
            entry_without_spec(
                plugin,
                "broken",
                Reason("import_failed", describe_error(error), "reinstall the plugin"),
            )
        ]
    except BaseException as error:  # a plugin may raise anything
        if is_ctrl_c(error):
            raise
        reason = Reason("load_failed", describe_error(error), report_hint(plugin.distribution))
        return [entry_without_spec(plugin, "broken", reason)]
    if not entries:
        text = "its hook nsa_register_backends is missing or registered nothing"
        return [
            entry_without_spec(
                plugin,
                "broken",
                Reason("registers_nothing", text, report_hint(plugin.distribution)),
            )
        ]
    return entries


def load_spec(spec: BackendSpec, version: str, distribution: str) -> BackendEntry:
    """Return the entry of a spec that no installed plugin provides, with the same checks."""
    return _entry(Plugin(str(spec.name), distribution, version, ""), spec)


def entry_without_spec(
    plugin: Plugin, status: str, reason: Reason, name: str | None = None
) -> BackendEntry:
    """Return an entry without a spec, for a plugin that cannot be used."""
    return BackendEntry(
        name or plugin.name,
        plugin.distribution,
        plugin.version,
        status,
        reason,
        None,
        plugin.value,
        plugin.first_party,
    )


def _entry(plugin: Plugin, result: object) -> BackendEntry:
    """Check one result of the hook, and return its entry: ready, or with a reason."""
    if isinstance(result, Unavailable):
        faults = [] if _is_name(result.name) else [f"name {result.name!r} is not a backend name"]
        faults += [] if is_reason(result.reason) else ["reason is not a Reason"]
        if not faults:
            return entry_without_spec(plugin, "unavailable", result.reason, result.name)
    elif isinstance(result, BackendSpec):
        name = result.name if _is_name(result.name) else plugin.name
        mismatch = _api_reason(result.api_version)
        if mismatch:
            return entry_without_spec(plugin, "incompatible", mismatch, name)
        faults = _spec_faults(result)
        if not faults:
            copied_mappings: dict[str, Any] = {
                n: dict(getattr(result, n))
                for n in ("slots", "slot_priority", "fused", "fused_workspace")
            }
            spec = dataclasses.replace(result, **copied_mappings)
            return dataclasses.replace(
                entry_without_spec(plugin, "ready", Reason("", ""), name), reason=None, spec=spec
            )
    else:
        faults = [f"the hook returned {type(result).__name__}, not a BackendSpec or Unavailable"]
    name = result.name if hasattr(result, "name") and _is_name(result.name) else plugin.name
    reason = Reason("bad_spec", one_line("; ".join(faults)), report_hint(plugin.distribution))
    return entry_without_spec(plugin, "broken", reason, name)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _api_reason(version: Any) -> Reason | None:
    """Return the reason why contract ``version`` is incompatible, or None.

    A malformed version gives None here; :func:`_spec_faults` reports it.
    """
    if not _is_version(version) or (version[0] == API_VERSION[0] and version[1] <= API_VERSION[1]):
        return None
    text = f"written for contract {_dotted(version)}, this nsa-core has {_dotted(API_VERSION)}"
    return Reason(
        "api_version", text, "upgrade " + ("nsa-core" if version > API_VERSION else "the plugin")
    )


def _is_version(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(part) is int for part in value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(_NAME.fullmatch(value)) and value != "auto"


def is_reason(value: Any) -> bool:
    """Return whether ``value`` is a Reason whose fields are all strings."""
    return isinstance(value, Reason) and all(
        isinstance(t, str) for t in (value.code, value.message, value.hint)
    )


def _is_function(value: Any) -> bool:
    return isinstance(value, str) and bool(_FUNCTION.fullmatch(value))


def _spec_faults(spec: BackendSpec) -> list[str]:
    faults = [] if _is_name(spec.name) else [f"name {spec.name!r} is not a backend name"]
    if not _is_version(spec.api_version):
        faults.append(f"api_version must be (major, minor), got {spec.api_version!r}")
    if not _is_function(spec.probe):
        faults.append(f"probe must be 'module:function', got {spec.probe!r}")
    for field in ("detail", "rank"):
        value = getattr(spec, field)
        if value is not None and not _is_function(value):
            faults.append(f"{field} must be None or 'module:function', got {value!r}")
    if type(spec.priority) is not int:
        faults.append(f"priority must be an integer, got {spec.priority!r}")
    if not isinstance(spec.summary, str):
        faults.append(f"summary must be a string, got {spec.summary!r}")
    for field in ("slots", "slot_priority"):
        value = getattr(spec, field)
        if not isinstance(value, Mapping):
            return [*faults, f"{field} must be a mapping whose keys are slots, got {value!r}"]
        faults += [f"unknown slot {key!r} in {field}" for key in value if key not in SLOTS]
    if not spec.slots:
        faults.append("slots is empty: a backend must offer at least one slot")
    if not isinstance(spec.fused, Mapping) or not all(
        k in FUSED and _is_function(v) for k, v in spec.fused.items()
    ):
        faults.append(f"fused must map {', '.join(FUSED)} to 'module:function', got {spec.fused!r}")
    elif not isinstance(spec.fused_workspace, Mapping) or not all(
        k in spec.fused and _is_function(v) for k, v in spec.fused_workspace.items()
    ):
        entries = f"map {', '.join(spec.fused)} to 'module:function'"
        needed = entries if spec.fused else "be empty, as fused"
        faults.append(f"fused_workspace must {needed}, got {spec.fused_workspace!r}")
    faults += [
        f"slot_priority of {k} must be an integer"
        for k, v in spec.slot_priority.items()
        if type(v) is not int
    ]
    for slot, value in spec.slots.items():
        faults += [f"slot {slot}: {fault}" for fault in _slot_faults(value)]
    return faults


def _slot_faults(slot: Any) -> list[str]:
    if not isinstance(slot, SlotSpec):
        return [f"{type(slot).__name__} is not a SlotSpec"]
    faults = (
        []
        if _is_function(slot.forward)
        else [f"forward must be 'module:function', got {slot.forward!r}"]
    )
    for field in ("backward", "decode", "workspace"):
        value = getattr(slot, field)
        if value is not None and not _is_function(value):
            faults.append(f"{field} must be None or 'module:function', got {value!r}")
    if not isinstance(slot.evidence, tuple) or not all(
        isinstance(text, str) for text in slot.evidence
    ):
        faults.append(f"evidence must be a tuple of strings, got {slot.evidence!r}")
    for field in ("deterministic", "reads_boundaries"):
        if type(getattr(slot, field)) is not bool:
            faults.append(f"{field} must be True or False, got {getattr(slot, field)!r}")
    return faults
