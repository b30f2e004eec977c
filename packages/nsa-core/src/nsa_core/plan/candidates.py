"""Collect the candidates for every slot, in the order in which `auto` prefers them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from nsa_core.config import NSAConfig, check_config
from nsa_core.contract import SLOTS, Request
from nsa_core.dtypes import dtype_name
from nsa_core.errors import InvalidInput
from nsa_core.plan import tuned
from nsa_core.plan.device import usable_device
from nsa_core.plan.gpus import GPU
from nsa_core.plan.options import Backends, PlanOptions
from nsa_core.plan.probing import Candidate, rank_of, reasons_against
from nsa_core.plan.registry import Registry
from nsa_core.util.text import did_you_mean


@dataclasses.dataclass(frozen=True, eq=False)
class Candidates:
    """The request of every slot, and the candidates for it.

    Attributes:
        config: Configuration of the layer.
        requests: slot -> its request.
        chosen_by_name: slot -> the backend that the caller chose by name, or None for `auto`.
        by_slot: slot -> one candidate per backend, in the order in which `auto` prefers them.
        registry: The registry that holds the backends.
        tuned: slot -> the measurement of `nsa tune` that put a candidate first. Slots without such
            a measurement are absent.
    """

    config: NSAConfig
    requests: Mapping[str, Request]
    chosen_by_name: Mapping[str, str | None]
    by_slot: Mapping[str, tuple[Candidate, ...]]
    registry: Registry
    tuned: Mapping[str, str] = dataclasses.field(default_factory=dict)


def request_of(
    config: NSAConfig, slot: str, *, dtype: str | torch.dtype = "float32", **fields: Any
) -> Request:
    """Return the request that a layer of ``config`` makes to ``slot``.

    Args:
        config: Configuration of the layer: heads, head widths and block geometry.
        slot: One of contract.SLOTS.
        dtype: dtype of q, k and v.
        **fields: The other fields of :class:`nsa_core.contract.Request`, by name.

    Raises:
        InvalidInput: A field has the wrong type or is out of range.
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


def find_candidates(
    config: NSAConfig, options: PlanOptions, *, registry: Registry, gpu: GPU | None = None
) -> Candidates:
    """Probe every backend of ``registry`` for every slot, and sort the candidates.

    Args:
        config: Configuration of the layer.
        options: The other choices about the plan.
        registry: The registry of backends.
        gpu: A GPU to simulate: the requests are for it, whatever GPU this machine has, and no
            measurement of `nsa tune` counts. ``options.device`` must be "cuda".

    Raises:
        InvalidInput: An option is wrong for every backend, or names an unknown slot or backend.
        BackendUnavailable: PyTorch cannot use the device.
    """
    check_config(config)
    chosen_by_name = _backends_by_name(options.backends, registry)
    device = usable_device(options.device) if gpu is None else torch.device("cuda")
    requests = _requests(config, options, device, gpu)
    ranked: dict[str, list[tuple[tuple[bool, int, str], Candidate]]] = {s: [] for s in SLOTS}
    for entry in registry.entries:
        for slot, request in requests.items():
            reasons = reasons_against(entry, request)
            rank, reasons = rank_of(entry, request, reasons)
            has_rank_function = entry.spec is not None and entry.spec.rank is not None
            shown = (rank.value, rank.reason) if has_rank_function and not reasons else (None, "")
            candidate = Candidate(entry.name, entry.version, entry.status, reasons, *shown)
            ranked[slot].append(((entry.spec is None, -rank.value, entry.name), candidate))
    by_slot = {
        slot: tuple(candidate for _, candidate in sorted(pairs, key=lambda pair: pair[0]))
        for slot, pairs in ranked.items()
    }
    tuned_slots = {} if gpu else _prefer_tuned(by_slot, requests, device)
    return Candidates(
        config,
        MappingProxyType(requests),
        MappingProxyType(chosen_by_name),
        MappingProxyType(by_slot),
        registry,
        MappingProxyType(tuned_slots),
    )


def _requests(
    config: NSAConfig, options: PlanOptions, device: torch.device, gpu: GPU | None
) -> dict[str, Request]:
    fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    del fields["backends"]
    fields["device"] = device.type
    if gpu is not None:
        fields["capability"] = gpu.capability
    else:
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
    """Move the backend that `nsa tune` measured as the fastest on this device to the front.

    Changes ``by_slot`` in place.

    Returns:
        slot -> the measurement as text, for each slot that has a valid record.
    """
    if not tuned.path().exists():
        return {}
    is_cuda = device.type == "cuda"
    device_name = torch.cuda.get_device_name(device) if is_cuda else tuned.processor_name()
    measurements = {}
    for slot, candidates in by_slot.items():
        accepted = {c.backend: c.version for c in candidates if c.accepted}
        fastest = tuned.choose(requests[slot], device_name, accepted)
        if fastest is not None:
            by_slot[slot] = tuple(sorted(candidates, key=lambda c: c.backend != fastest[0]))
            measurements[slot] = fastest[1]
    return measurements


def backends_problems(backends: object) -> list[str]:
    """Return what is wrong with ``backends``, the argument of resolve(); [] if it is valid.

    The result does not depend on the installed backends: an unknown name is not a problem here.
    """
    if backends is None or isinstance(backends, str):
        return []
    if not isinstance(backends, Mapping):
        return [f"backends must be None, a name, or a mapping of slots to names, got {backends!r}"]
    problems = [
        f"unknown slot {slot!r}{did_you_mean(str(slot), SLOTS)}"
        for slot in backends
        if slot not in SLOTS
    ]
    invalid_names = {
        slot: name for slot, name in backends.items() if not (name is None or isinstance(name, str))
    }
    return problems + [
        f"the backend of slot {slot!r} must be a name, got {name!r}"
        for slot, name in invalid_names.items()
    ]


def _backends_by_name(backends: Backends, registry: Registry) -> dict[str, str | None]:
    """Return the backend that the caller chose for each slot, or None for `auto`.

    Raises:
        InvalidInput: ``backends`` is invalid, or names a backend that the registry does not know.
    """
    problems = backends_problems(backends)
    if backends is None or isinstance(backends, str):
        backends = dict.fromkeys(SLOTS, backends)
    chosen_by_name: dict[str, str | None] = dict.fromkeys(SLOTS)
    for slot, name in backends.items() if isinstance(backends, Mapping) else ():
        if name is None or name == "auto" or not isinstance(name, str):
            continue
        chosen_by_name[slot] = name
        try:
            registry.get(name)
        except InvalidInput as error:
            problems.append(str(error))
    if problems:
        raise InvalidInput("; ".join(dict.fromkeys(problems)))
    return chosen_by_name
