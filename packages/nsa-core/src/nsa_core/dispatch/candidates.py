"""The candidates for every slot: each backend's answer to what is asked, in the order of `auto`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from nsa_core.config import NSAConfig, must_be_config
from nsa_core.contract import SLOTS, Reason, Request
from nsa_core.dispatch import tuned
from nsa_core.dispatch.device import known_device
from nsa_core.dispatch.options import Backends, PlanOptions
from nsa_core.dispatch.probing import Candidate, rank_of, reasons_against
from nsa_core.dispatch.registry import Registry
from nsa_core.dtypes import dtype_name
from nsa_core.errors import InvalidInput
from nsa_core.util.text import did_you_mean


@dataclasses.dataclass(frozen=True, eq=False)
class Candidates:
    """What is asked of every slot, and every backend's answer.

    Attributes:
        config: the layer's configuration.
        requests: slot -> what is asked of it.
        wanted: slot -> the backend asked for by name; None: auto.
        by_slot: slot -> candidates, in the order in which `auto` prefers them.
        registry: where the backends come from.
        tuned: slot -> why `nsa tune` put its first candidate first, where it did.
    """

    config: NSAConfig
    requests: Mapping[str, Request]
    wanted: Mapping[str, str | None]
    by_slot: Mapping[str, tuple[Candidate, ...]]
    registry: Registry
    tuned: Mapping[str, str] = dataclasses.field(default_factory=dict)


def request_of(
    config: NSAConfig, slot: str, *, dtype: str | torch.dtype = "float32", **fields: Any
) -> Request:
    """What a layer of ``config`` asks of ``slot``; ``fields`` are the request's others.

    Raises:
        InvalidInput: a field is out of range.
    """
    return Request(
        slot=slot,
        geometry=config.geometry,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.qk_dim,
        v_head_dim=config.v_dim,
        dtype=dtype_name(dtype),
        **fields,
    )


def find_candidates(config: NSAConfig, options: PlanOptions, *, registry: Registry) -> Candidates:
    """Ask every backend of ``registry`` about every slot.

    Raises:
        InvalidInput: an option is wrong for every backend, or names an unknown slot or backend.
        BackendUnavailable: this torch does not have the device.
    """
    must_be_config(config)
    wanted = _wanted(options.backends, registry)
    device = known_device(options.device)
    requests = _requests(config, options, device)
    ranked: dict[str, list[tuple[tuple[bool, int, str], Candidate]]] = {s: [] for s in SLOTS}
    for entry in registry.entries:
        given_up: Reason | None = None
        for slot, request in requests.items():
            reasons = reasons_against(entry, request, given_up)
            given_up = next((r for r in reasons if r.code == "probe_too_slow"), None)
            rank, reasons = rank_of(entry, request, reasons)
            ranks_itself = entry.spec is not None and entry.spec.rank is not None
            shown_rank = rank if ranks_itself and not reasons else None
            candidate = Candidate(entry.name, entry.version, entry.status, reasons, shown_rank)
            ranked[slot].append(((entry.spec is None, -rank, entry.name), candidate))
    by_slot = {
        slot: tuple(candidate for _, candidate in sorted(pairs, key=lambda pair: pair[0]))
        for slot, pairs in ranked.items()
    }
    tuned_slots = _prefer_tuned(by_slot, requests, device)
    return Candidates(
        config,
        MappingProxyType(requests),
        MappingProxyType(wanted),
        MappingProxyType(by_slot),
        registry,
        MappingProxyType(tuned_slots),
    )


def _requests(config: NSAConfig, options: PlanOptions, device: torch.device) -> dict[str, Request]:
    fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    del fields["backends"]
    fields["device"] = device.type
    is_cuda = device.type == "cuda"
    fields["capability"] = torch.cuda.get_device_capability(device) if is_cuda else None
    if options.deterministic is None:
        fields["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return {slot: request_of(config, slot, **fields) for slot in SLOTS}


def _prefer_tuned(
    by_slot: dict[str, tuple[Candidate, ...]],
    requests: Mapping[str, Request],
    device: torch.device,
) -> dict[str, str]:
    """Put the backend that `nsa tune` measured to be fastest on this device first.

    Returns:
        slot -> the sentence that says so.
    """
    if not tuned.path().exists():
        return {}
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else tuned.processor_name()
    sentences = {}
    for slot, candidates in by_slot.items():
        accepted = {c.backend: c.version for c in candidates if c.accepted}
        best = tuned.choose(requests[slot], name, accepted)
        if best is not None:
            by_slot[slot] = tuple(sorted(candidates, key=lambda c: c.backend != best[0]))
            sentences[slot] = best[1]
    return sentences


def backends_problems(backends: object) -> list[str]:
    """What makes ``backends`` unusable for resolve(), whichever backends are installed."""
    if backends is None or isinstance(backends, str):
        return []
    if not isinstance(backends, Mapping):
        return [f"backends must be None, a name, or a mapping of slots to names, got {backends!r}"]
    wrong = [
        f"unknown slot {slot!r}{did_you_mean(str(slot), SLOTS)}"
        for slot in backends
        if slot not in SLOTS
    ]
    strangers = {
        slot: name for slot, name in backends.items() if not (name is None or isinstance(name, str))
    }
    return wrong + [
        f"the backend of slot {slot!r} must be a name, got {name!r}"
        for slot, name in strangers.items()
    ]


def _wanted(backends: Backends, registry: Registry) -> dict[str, str | None]:
    wrong = backends_problems(backends)
    if backends is None or isinstance(backends, str):
        backends = dict.fromkeys(SLOTS, backends)
    wanted: dict[str, str | None] = dict.fromkeys(SLOTS)
    for slot, name in backends.items() if isinstance(backends, Mapping) else ():
        if name is None or name == "auto" or not isinstance(name, str):
            continue
        wanted[slot] = name
        try:
            registry.get(name)
        except InvalidInput as error:
            wrong.append(str(error))
    if wrong:
        raise InvalidInput("; ".join(dict.fromkeys(wrong)))
    return wanted
