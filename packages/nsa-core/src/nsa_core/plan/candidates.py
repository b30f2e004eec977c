"""The candidates for every slot: ask each backend, and sort them as `auto` prefers them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from nsa_core.config import NSAConfig, check_config
from nsa_core.contract import DTYPES, PHASES, SLOTS, BackendSpec, Reason, Request
from nsa_core.dtypes import dtype_name
from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_core.plan import tuned
from nsa_core.plan.gpus import GPU, gpu_named
from nsa_core.plan.loading import BackendEntry
from nsa_core.plan.options import Backends, PlanOptions, backends_problems, usable_device
from nsa_core.plan.plugin_calls import FAULTS, PluginFault, ask, call_detail, call_probe, call_rank
from nsa_core.plan.registry import Registry
from nsa_core.torch_ops.schema import DIFFERENTIABLE
from nsa_core.util.text import one_line

_GPUS_OF_FACTS = (None, *map(gpu_named, ("T4", "A100", "H100", "RTX-5090")))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One backend considered for one slot's request.

    Attributes:
        backend: Name of the backend.
        version: Version of its distribution.
        status: Status of the backend, one of loading.STATUSES.
        reasons: Every reason against the request.
        rank: Rank of the backend for this request, if it accepts and has a rank function.
        rank_reason: Why it has this rank, if its rank function says so.
    """

    backend: str
    version: str
    status: str
    reasons: tuple[Reason, ...]
    rank: int | None = None
    rank_reason: str = ""

    @property
    def accepted(self) -> bool:
        """Whether the backend is ready and has no reason against the request."""
        return self.status == "ready" and not self.reasons

    def __str__(self) -> str:
        title = f"{one_line(self.backend)} {one_line(self.version)}"
        if self.accepted:
            return f"{title}: accepted"
        reasons = "; ".join(one_line(reason) for reason in self.reasons)
        return f"{title}: {'not supported' if self.status == 'ready' else self.status}: {reasons}"


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
        assumed: For a simulated GPU, backend -> the reasons against it that are facts of this
            machine, such as a missing package. The candidates assume a machine without them.
    """

    config: NSAConfig
    requests: Mapping[str, Request]
    chosen_by_name: Mapping[str, str | None]
    by_slot: Mapping[str, tuple[Candidate, ...]]
    registry: Registry
    tuned: Mapping[str, str] = dataclasses.field(default_factory=dict)
    assumed: Mapping[str, frozenset[Reason]] = dataclasses.field(default_factory=dict)

    def spec_of(self, backend: str) -> BackendSpec:
        """Return the specification of a backend that accepts a request."""
        spec = self.registry.get(backend).spec
        assert spec is not None  # its status is "ready"
        return spec

    def of(self, entry: BackendEntry) -> dict[str, Candidate]:
        """Return slot -> the candidate of a backend that was loaded; {} for any other one."""
        return {
            slot: candidate
            for slot, candidates in self.by_slot.items()
            for candidate in candidates
            if candidate.status == entry.status == "ready" and candidate.backend == entry.name
        }


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


def describe_request(request: Request) -> str:
    """Return the request as one line: sizes under the contract's symbols, dtype, device, flags.

    A request of sel has the sizes that it depends on, any other one those of a layer.
    """
    g = request.geometry
    blocks = f"l'={g.select_block_size} n={g.num_selected_blocks}"
    if request.slot != "sel":
        blocks = f"l={g.compress_block_size} d={g.compress_stride} {blocks} w={g.window_size}"
    batch, seq_len = ("any" if n is None else n for n in (request.batch, request.seq_len))
    shape = (
        f"B={batch} S={seq_len} Hq={request.n_heads}"
        f" G={request.n_kv_heads} Dk={request.head_dim} Dv={request.v_head_dim} {blocks}"
    )
    device = request.device + (
        f" sm_{request.capability[0]}{request.capability[1]}" if request.capability else ""
    )
    conditions = {
        "gradients": request.needs_grad,
        "deterministic": request.deterministic,
        "packed": request.varlen,
        "queries inside a sequence": request.partial,
        f"pages of {request.page_size} tokens": request.page_size,
        f"keys and values in {request.kv_dtype}": request.kv_dtype,
    }
    flags = [flag for flag, holds in conditions.items() if holds]
    return ", ".join([shape, f"{request.dtype} on {device}", request.phase, *flags])


def find_candidates(
    config: NSAConfig, options: PlanOptions, *, registry: Registry, gpu: GPU | None = None
) -> Candidates:
    """Probe every backend of ``registry`` for every slot, and sort the candidates.

    Args:
        config: Configuration of the layer.
        options: The other choices about the plan.
        registry: The registry of backends.
        gpu: A GPU to simulate: the requests are for a full installation on it, whatever this
            machine has, and no measurement of `nsa tune` counts. ``options.device`` must be "cuda".

    Raises:
        InvalidInput: An option is wrong for every backend, or names an unknown slot or backend.
        BackendUnavailable: PyTorch cannot use the device.
    """
    check_config(config)
    chosen_by_name = _backends_by_name(options.backends, registry)
    device = usable_device(options.device) if gpu is None else torch.device("cuda")
    requests = _requests(config, options, device, gpu)
    ranked: dict[str, list[tuple[tuple[bool, int, str], Candidate]]] = {s: [] for s in SLOTS}
    assumed: dict[str, frozenset[Reason]] = {}
    for entry in registry.entries:
        if gpu is not None and entry.spec is not None and (facts := facts_of_this_machine(entry)):
            assumed[entry.name] = facts
        for slot, request in requests.items():
            candidate = probe_candidate(entry, request)
            if entry.name in assumed:
                reasons = tuple(r for r in candidate.reasons if r not in assumed[entry.name])
                candidate = dataclasses.replace(candidate, reasons=reasons)
            candidate, rank = with_rank(entry, request, candidate)
            ranked[slot].append(((entry.spec is None, -rank, entry.name), candidate))
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
        MappingProxyType(assumed),
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
    if options.kv_dtype is not None:
        fields["kv_dtype"] = dtype_name(options.kv_dtype)
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
    if not (records := tuned.load()):
        return {}
    is_cuda = device.type == "cuda"
    device_name = torch.cuda.get_device_name(device) if is_cuda else tuned.processor_name()
    measurements = {}
    for slot, candidates in by_slot.items():
        accepted = {c.backend: c.version for c in candidates if c.accepted}
        fastest = tuned.choose(records, requests[slot], device_name, accepted)
        if fastest is not None:
            by_slot[slot] = tuple(sorted(candidates, key=lambda c: c.backend != fastest[0]))
            measurements[slot] = fastest[1]
    return measurements


def _backends_by_name(backends: Backends, registry: Registry) -> dict[str, str | None]:
    """Return the backend that the caller chose for each slot, or None for `auto`.

    Raises:
        InvalidInput: ``backends`` is invalid, or names a backend that the registry does not know.
    """
    by_slot = backends if isinstance(backends, Mapping) else dict.fromkeys(SLOTS, backends)
    names = {slot: n for slot, n in by_slot.items() if isinstance(n, str) and n != "auto"}
    if problems := backends_problems(backends) + registry.unknown(names.values()):
        raise InvalidInput("; ".join(problems))
    return {**dict.fromkeys(SLOTS), **names}


def probe_candidate(entry: BackendEntry, request: Request) -> Candidate:
    """Return ``entry`` as a candidate for ``request``, whose device need not exist here."""
    return Candidate(entry.name, entry.version, entry.status, _reasons_against(entry, request))


def _reasons_against(entry: BackendEntry, request: Request) -> tuple[Reason, ...]:
    """Return every reason against running ``request`` on ``entry``; a failing probe is one."""
    if entry.spec is None:
        assert entry.reason is not None  # an entry has either a spec or a reason
        return (entry.reason,)
    slot, name = entry.spec.slots.get(request.slot), request.slot
    if slot is None:
        return (Reason("slot_not_offered", f"does not offer {name}"),)
    if request.partial and not slot.partial and name != "combine":
        text = f"does not take queries that begin inside a sequence in {name}"
        return (Reason("no_partial", text, "pass whole sequences, or use another backend"),)
    reasons = []
    if request.kv_dtype and not slot.quantized and name != "combine":
        text = f"does not take {request.kv_dtype} pages in {name}"
        reasons.append(Reason("no_quantized", text, f"use pages of {request.dtype}, or triton"))
    if request.phase == "decode" and slot.decode is None and name != "combine":
        text = f"has no decode form of {name}"
        reasons.append(Reason("no_decode", text, "use another backend to decode"))
    if request.needs_grad and slot.backward is None and DIFFERENTIABLE[name]:
        text = f"has no backward for {name}"
        reasons.append(Reason("no_backward", text, "use another backend to train"))
    try:
        reasons += ask(entry, "probe", call_probe, entry.spec.probe, request)
    except PluginFault as fault:
        reasons.append(_fault_reason(entry, "probe", fault))
    return tuple(reasons)


def with_rank(entry: BackendEntry, request: Request, candidate: Candidate) -> tuple[Candidate, int]:
    """Return a candidate with its rank, and the number of which `auto` prefers the highest.

    A failure of the rank function is a reason against the candidate.
    """
    if entry.spec is None:
        return candidate, 0
    priority = entry.spec.priority_of(request.slot)
    if candidate.reasons or entry.spec.rank is None:
        return candidate, priority
    try:
        rank = ask(entry, "rank function", call_rank, entry.spec.rank, request)
    except PluginFault as fault:
        reasons = (_fault_reason(entry, "rank", fault),)
        return dataclasses.replace(candidate, reasons=reasons), priority
    return dataclasses.replace(candidate, rank=rank.value, rank_reason=rank.reason), rank.value


def _fault_reason(entry: BackendEntry, what: str, fault: PluginFault) -> Reason:
    return Reason(f"{what}_{fault.fault}", str(fault), entry.report_hint)


def details(entry: BackendEntry) -> list[str]:
    """Return the lines of the backend's detail function; a failure of that function is a line."""
    if entry.spec is None or entry.spec.detail is None:
        return []
    try:
        lines = ask(entry, "detail function", call_detail, entry.spec.detail)
    except PluginFault as fault:
        return [str(fault)]
    return [one_line(text) for text in lines]


def facts_of_this_machine(entry: BackendEntry) -> frozenset[Reason]:
    """Return the reasons of ``entry`` that neither the request nor the GPU can change.

    They are the reasons against every request of a grid of devices, dtypes and phases, such as a
    missing package. An answer for another GPU assumes that they do not hold there.
    """
    if entry.spec is None:
        return frozenset() if entry.reason is None else frozenset({entry.reason})
    constant: set[Reason] | None = None
    for slot in entry.spec.slots:
        for request in _grid(slot):
            reasons = probe_candidate(entry, request).reasons
            constant = {*reasons} if constant is None else constant & {*reasons}
            # A probe that fails is no fact of this machine, and may take seconds per request.
            if not constant or any(reason.code in FAULTS for reason in reasons):
                return frozenset()
    return frozenset(constant or ())


def _grid(slot: str) -> Iterable[Request]:
    """Yield requests to ``slot`` for the CPU and several GPUs, in every dtype and phase."""
    for gpu in _GPUS_OF_FACTS:
        for dtype in DTYPES:
            for phase in PHASES:
                yield Request(
                    slot=slot,
                    geometry=BlockGeometry(),
                    n_heads=12,
                    n_kv_heads=2,
                    head_dim=64,
                    v_head_dim=64,
                    dtype=dtype,
                    device="cuda" if gpu else "cpu",
                    capability=gpu.capability if gpu else None,
                    phase=phase,
                )
