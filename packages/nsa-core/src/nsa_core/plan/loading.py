"""Find the installed plugins by their metadata, and load each one alone. Imports no torch.

Plain pluggy stops at the first plugin that fails to load. Here every entry point has its own pluggy
manager, its own exception handling and its own status.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Iterator
from typing import Any

import pluggy

from nsa_core.contract import (
    API_VERSION,
    ENTRY_POINT_GROUP,
    PROJECT,
    BackendSpec,
    Hooks,
    Reason,
    Unavailable,
)
from nsa_core.plan.spec_checks import MAPPINGS, faults_of, is_name, is_version
from nsa_core.util.child import Child
from nsa_core.util.global_state import loading
from nsa_core.util.interruption import is_ctrl_c
from nsa_core.util.text import describe_error, one_line

FIRST_PARTY = ("nsa-backend-sdpa", "nsa-backend-triton", "nsa-backend-fa2")
STATUSES = ("ready", "unavailable", "incompatible", "broken", "disabled")


def normalized(name: str) -> str:
    """Return ``name`` in lower case, with "-" for each run of "-", "_" and ".".

    Names that normalize alike count as one, as for distributions and operator namespaces.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclasses.dataclass(frozen=True)
class Plugin:
    """An entry point of group ``nsa.backends``, from the metadata of its distribution.

    Attributes:
        name: Name of the entry point.
        distribution: Name of the distribution that provides it.
        version: Version of that distribution.
        entry_point: "module" or "module:attribute"; "" if the metadata cannot be read.
    """

    name: str
    distribution: str
    version: str
    entry_point: str

    @property
    def first_party(self) -> bool:
        """Whether the distribution is one of this project's own."""
        return normalized(self.distribution) in FIRST_PARTY

    @property
    def report_hint(self) -> str:
        """A hint where to report a fault of the plugin."""
        if self.first_party:
            return (
                "this is a bug in NSA itself: please report it with the output of"
                " `nsa doctor --report`"
            )
        return "report it to the plugin's author"


@dataclasses.dataclass(frozen=True)
class BackendEntry(Plugin):
    """A backend in the registry, usable or not, with the metadata of its plugin.

    Attributes:
        name: Name of the backend.
        status: One of STATUSES.
        reason: Why the backend cannot be used; None if its status is "ready".
        spec: The specification that it registered; None unless its status is "ready".
        child: The process in which its code runs; None: this one. It is not pickled.
    """

    status: str
    reason: Reason | None = None
    spec: BackendSpec | None = None
    child: Child | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def title(self) -> str:
        """Name and version, for messages."""
        return f"{one_line(self.name)} {one_line(self.version)}"


def installed() -> list[Plugin]:
    """Return every installed plugin, sorted by name. Reads metadata only and imports nothing.

    If a distribution is on the path twice, the first copy counts, as for imports. A distribution
    whose entry points cannot be read becomes a Plugin without an entry point, which :func:`load`
    reports as broken.
    """
    plugins: dict[tuple[str, str, str], Plugin] = {}
    first_position: dict[str, int] = {}  # distribution -> where on the path it occurs first
    for position, dist in enumerate(importlib.metadata.distributions()):
        for plugin in _plugins_of(dist):
            if first_position.setdefault(normalized(plugin.distribution), position) == position:
                plugins.setdefault((plugin.distribution, plugin.name, plugin.entry_point), plugin)
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


def call_plugin(plugin: Plugin) -> list[object]:
    """Import an entry point, call its hook, and return a flat list of the unchecked results.

    Raises whatever the plugin raises.
    """
    path = plugin.entry_point
    module = importlib.metadata.EntryPoint(plugin.name, path, ENTRY_POINT_GROUP).load()
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    manager.register(module, name=path)
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
    if not plugin.entry_point:
        reason = Reason("bad_metadata", "its entry points cannot be read", "reinstall it")
        return [entry_without_spec(plugin, "broken", reason)]
    try:
        with loading(plugin.name):
            results = call_plugin(plugin)
        entries = [_entry(plugin, result) for result in results]
    except BaseException as error:  # a plugin may raise anything
        if is_ctrl_c(error):
            raise
        return [entry_without_spec(plugin, *_failure(plugin, error))]
    if not entries:
        text = "its hook nsa_register_backends is missing or registered nothing"
        reason = Reason("registers_nothing", text, plugin.report_hint)
        return [entry_without_spec(plugin, "broken", reason)]
    return entries


def _failure(plugin: Plugin, error: BaseException) -> tuple[str, Reason]:
    """Return the status and the reason of a plugin that ``error`` kept from loading."""
    text = describe_error(error)
    if isinstance(error, pluggy.PluginValidationError):
        text = f"does not fit contract {_dotted(API_VERSION)}: {text}"
        return "incompatible", Reason("stale_hook", text, "upgrade the plugin or nsa-core")
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").partition(".")[0]
        own = plugin.entry_point.partition(":")[0].partition(".")[0]
        if missing not in ("", own, "nsa_core"):
            hint = f"install the package that provides {missing!r}"
            return "unavailable", Reason("dependency_missing", text, hint)
    if isinstance(error, ImportError):
        return "broken", Reason("import_failed", text, "reinstall the plugin")
    return "broken", Reason("load_failed", text, plugin.report_hint)


def load_spec(spec: BackendSpec, version: str, distribution: str) -> BackendEntry:
    """Return the entry of a spec that no installed plugin provides, with the same checks."""
    return _entry(Plugin(str(spec.name), distribution, version, ""), spec)


def entry_without_spec(plugin: Plugin, status: str, reason: Reason) -> BackendEntry:
    """Return an entry without a spec, for a plugin that cannot be used."""
    return BackendEntry(**vars(plugin), status=status, reason=reason)


def _entry(plugin: Plugin, result: object) -> BackendEntry:
    """Check one result of the hook, and return its entry: ready, or with a reason."""
    name = getattr(result, "name", "")
    plugin = dataclasses.replace(plugin, name=name if is_name(name) else plugin.name)
    if isinstance(result, BackendSpec) and (mismatch := _api_reason(result.api_version)):
        return entry_without_spec(plugin, "incompatible", mismatch)
    if faults := faults_of(result):
        reason = Reason("bad_spec", one_line("; ".join(faults)), plugin.report_hint)
        return entry_without_spec(plugin, "broken", reason)
    if isinstance(result, Unavailable):
        return entry_without_spec(plugin, "unavailable", result.reason)
    assert isinstance(result, BackendSpec)  # faults_of() reports every other object
    copied_mappings: dict[str, Any] = {field: dict(getattr(result, field)) for field in MAPPINGS}
    spec = dataclasses.replace(result, **copied_mappings)
    return BackendEntry(**vars(plugin), status="ready", spec=spec)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _api_reason(version: Any) -> Reason | None:
    """Return the reason why contract ``version`` is incompatible, or None.

    A malformed version gives None here; :func:`nsa_core.plan.spec_checks.faults_of` reports it.
    """
    if not is_version(version) or (version[0] == API_VERSION[0] and version[1] <= API_VERSION[1]):
        return None
    text = f"written for contract {_dotted(version)}, this nsa-core has {_dotted(API_VERSION)}"
    upgrade = "nsa-core" if version > API_VERSION else "the plugin"
    return Reason("api_version", text, f"upgrade {upgrade}")
