"""Check what a plugin registers: one row of a table for each field. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nsa_core.contract import API_VERSION, FUSED, SLOTS, BackendSpec, Reason, SlotSpec, Unavailable

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Check(NamedTuple):
    """The valid values of a field: a test of one, and their description for the message."""

    is_valid: Callable[[Any], bool]
    expected: str


def is_name(value: object) -> bool:
    """Return whether ``value`` may be the name of a backend."""
    return isinstance(value, str) and bool(_NAME.fullmatch(value)) and value != "auto"


def is_version(value: object) -> bool:
    """Return whether ``value`` is a version of the contract, (major, minor)."""
    parts = value if isinstance(value, tuple) else ()
    return len(parts) == 2 and all(type(part) is int and part >= 0 for part in parts)


def is_reason(value: object) -> bool:
    """Return whether ``value`` is a Reason of strings with a code and a message."""
    if not isinstance(value, Reason) or not _are_strings((value.code, value.message, value.hint)):
        return False
    return bool(value.code and value.message)


def _is_function(value: object) -> bool:
    return isinstance(value, str) and bool(_FUNCTION.fullmatch(value))


def _are_strings(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) for text in value)


NAME = Check(is_name, "a letter and up to 63 letters, digits, '_', '.' and '-', but not 'auto'")
FUNCTION = Check(_is_function, "'module:function'")
OPTIONAL_FUNCTION = Check(lambda v: v is None or _is_function(v), "None or 'module:function'")
INTEGER = Check(lambda value: type(value) is int, "an integer")
BOOL = Check(lambda value: type(value) is bool, "True or False")

FIELDS: Mapping[type, Mapping[str, Check]] = {
    BackendSpec: {
        "name": NAME,
        "api_version": Check(is_version, f"(major, minor), such as {API_VERSION}"),
        "probe": FUNCTION,
        "priority": INTEGER,
        "summary": Check(lambda value: isinstance(value, str), "a string"),
        "rank": OPTIONAL_FUNCTION,
        "detail": OPTIONAL_FUNCTION,
        "judge_context": OPTIONAL_FUNCTION,
    },
    SlotSpec: {
        "forward": FUNCTION,
        "backward": OPTIONAL_FUNCTION,
        "decode": OPTIONAL_FUNCTION,
        "evidence": Check(lambda v: _are_strings(v) and "" not in v, "a tuple of nonempty strings"),
        "workspace": OPTIONAL_FUNCTION,
        "decode_workspace": OPTIONAL_FUNCTION,
        "deterministic": BOOL,
        "reads_boundaries": BOOL,
        "warmup_tokens": INTEGER,
        "partial": BOOL,
        "quantized": BOOL,
        "reads_lse": BOOL,
    },
    Unavailable: {
        "name": NAME,
        "reason": Check(is_reason, "a Reason of strings with a code and a message"),
    },
}
# The mappings of a BackendSpec: their keys, and their values.
MAPPINGS: Mapping[str, tuple[tuple[str, ...], Check]] = {
    "slots": (SLOTS, Check(lambda value: isinstance(value, SlotSpec), "a SlotSpec")),
    "slot_priority": (SLOTS, INTEGER),
    "fused": (FUSED, FUNCTION),
    "fused_workspace": (FUSED, FUNCTION),
}


def faults_of(registered: object) -> list[str]:
    """Return all that is wrong with a result of the hook; [] if it is valid."""
    if isinstance(registered, BackendSpec):
        return _field_faults(BackendSpec, registered) + _mapping_faults(registered)
    if isinstance(registered, Unavailable):
        return _field_faults(Unavailable, registered)
    return [f"the hook returned {type(registered).__name__}, not a BackendSpec or Unavailable"]


def _field_faults(kind: type, value: object) -> list[str]:
    return [
        f"{field} must be {check.expected}, got {getattr(value, field)!r}"
        for field, check in FIELDS[kind].items()
        if not check.is_valid(getattr(value, field))
    ]


def _mapping_faults(spec: BackendSpec) -> list[str]:
    values = {field: getattr(spec, field) for field in MAPPINGS}
    faults = [
        f"{field} must be a mapping of {', '.join(MAPPINGS[field][0])}, got {value!r}"
        for field, value in values.items()
        if not isinstance(value, Mapping)
    ]
    if faults:
        return faults
    for field, (keys, check) in MAPPINGS.items():
        for key, value in values[field].items():
            if key not in keys:
                faults.append(f"unknown key {key!r} in {field} (known: {', '.join(keys)})")
            elif not check.is_valid(value):
                faults.append(f"{field}[{key!r}] must be {check.expected}, got {value!r}")
    if not spec.slots:
        faults.append("slots is empty: a backend must offer at least one slot")
    faults += [
        f"fused_workspace has {form!r}, which is not in fused"
        for form in spec.fused_workspace
        if form not in spec.fused
    ]
    for key, slot in spec.slots.items():
        if isinstance(slot, SlotSpec):
            faults += [f"slot {key}: {fault}" for fault in _field_faults(SlotSpec, slot)]
    return faults
