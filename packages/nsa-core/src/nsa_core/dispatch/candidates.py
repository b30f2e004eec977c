"""What is asked of each slot, and what every backend says to it: the evidence a plan is decided
on.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from nsa_core.config import NSAConfig, must_be_config
from nsa_core.contract import SLOTS, Reason, Request, import_named
from nsa_core.dispatch import tuned
from nsa_core.dispatch.loading import BackendEntry, is_reason, report_hint
from nsa_core.dispatch.registry import Registry
from nsa_core.errors import BackendUnavailable, InvalidInput
from nsa_core.torch_ops.slot_op import DIFFERENTIABLE
from nsa_core.util.text import describe_error, did_you_mean, dtype_name, one_line

PROBE_LIMIT_S = 5.0

Backends = str | Mapping[str, str | None] | None


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One backend's answer to one slot's request: accepted when ready and without reasons."""

    backend: str
    version: str
    status: str  # the backend's: ready, unavailable, incompatible, broken, disabled
    reasons: tuple[Reason, ...]
    # for this request, where it accepts and the backend ranks requests itself
    rank: int | None = None

    @property
    def accepted(self) -> bool:
        """It would run."""
        return self.status == "ready" and not self.reasons

    def __str__(self) -> str:
        title = f"{one_line(self.backend)} {one_line(self.version)}"
        if self.accepted:
            return f"{title}: accepted"
        said = "; ".join(one_line(reason) for reason in self.reasons)
        return f"{title}: {'refused' if self.status == 'ready' else self.status}: {said}"


@dataclasses.dataclass(frozen=True, eq=False)
class Survey:
    """Requests and answers of every slot. ``candidates`` are in the order in which `auto` prefers
    them.
    """

    config: NSAConfig
    requests: Mapping[str, Request]
    wanted: Mapping[str, str | None]  # slot -> backend asked for, None: auto
    candidates: Mapping[str, tuple[Candidate, ...]]
    registry: Registry
    # slot -> why its first candidate is first
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


def survey(
    config: NSAConfig,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
    backends: Backends = None,
    needs_grad: bool = False,
    deterministic: bool | None = None,
    varlen: bool = False,
    phase: str = "prefill",
    batch: int | None = None,
    seq_len: int | None = None,
    page_size: int | None = None,
    registry: Registry,
) -> Survey:
    """Ask every backend of ``registry`` about every slot; arguments as
    :func:`nsa_core.dispatch.plan.resolve`.

    Raises:
        InvalidInput: an argument is wrong for every backend, or names a slot or backend that is not
            known.
        BackendUnavailable: the device is one this torch does not have.
    """
    must_be_config(config)
    wanted = _wanted(backends, registry)
    place = known_device(device)
    capability = torch.cuda.get_device_capability(place) if place.type == "cuda" else None
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    requests = {
        slot: request_of(
            config,
            slot,
            dtype=dtype,
            device=place.type,
            capability=capability,
            phase=phase,
            needs_grad=needs_grad,
            deterministic=deterministic,
            varlen=varlen,
            batch=batch,
            seq_len=seq_len,
            page_size=page_size,
        )
        for slot in SLOTS
    }
    candidates: dict[str, list[tuple[tuple[bool, int, str], Candidate]]] = {
        slot: [] for slot in SLOTS
    }
    for entry in registry.entries:
        given_up: Reason | None = None
        for slot, request in requests.items():
            reasons = _reasons(entry, request, given_up)
            given_up = next((r for r in reasons if r.code == "probe_too_slow"), None)
            rank, reasons = _rank(entry, request, reasons)
            own = (
                rank
                if not reasons and entry.spec is not None and entry.spec.rank is not None
                else None
            )
            candidate = Candidate(entry.name, entry.version, entry.status, reasons, own)
            candidates[slot].append(((entry.spec is None, -rank, entry.name), candidate))
    ranked = {
        slot: tuple(c for _, c in sorted(of, key=lambda pair: pair[0]))
        for slot, of in candidates.items()
    }
    said = _tune(ranked, requests, device)
    frozen = (MappingProxyType(requests), MappingProxyType(wanted), MappingProxyType(ranked))
    return Survey(config, *frozen, registry, MappingProxyType(said))


def _tune(
    ranked: dict[str, tuple[Candidate, ...]],
    requests: Mapping[str, Request],
    device: str | torch.device,
) -> dict[str, str]:
    """Put what was measured to be fastest on this device first; slot -> the sentence that says
    so.
    """
    if not tuned.path().exists():
        return {}
    place = torch.device(device)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else tuned.processor_name()
    said = {}
    for slot, candidates in ranked.items():
        accepted = {c.backend: c.version for c in candidates if c.accepted}
        best = tuned.choose(requests[slot], name, accepted)
        if best is not None:
            ranked[slot] = tuple(sorted(candidates, key=lambda c: c.backend != best[0]))
            said[slot] = best[1]
    return said


def ask(entry: BackendEntry, request: Request) -> Candidate:
    """What ``entry`` says to one request, which may describe a device that is not here."""
    return Candidate(entry.name, entry.version, entry.status, _reasons(entry, request, None))


def backends_problems(backends: object) -> list[str]:
    """What of ``backends`` no resolve() could take, whichever backends are installed."""
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


def known_device(device: str | torch.device) -> torch.device:
    """``device``, if it can be used here; touches CUDA only when a CUDA device is named.

    Raises:
        InvalidInput: torch knows no such device, or there are fewer of them.
        BackendUnavailable: it is a GPU, and this torch has none.
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(
            f"device {device!r} is not one that torch knows: {describe_error(error)}"
        ) from None
    if place.type != "cuda":
        return place
    if not torch.cuda.is_available():
        why = (
            "is built without CUDA"
            if torch.version.cuda is None
            else "finds no CUDA GPU and driver"
        )
        raise BackendUnavailable(
            f"device {str(place)!r} cannot be used: torch {torch.__version__} {why}"
        )
    count = torch.cuda.device_count()
    if place.index is not None and place.index >= count:
        raise InvalidInput(
            f"device {str(place)!r} does not exist: there are {count} CUDA devices, numbered from 0"
        )
    return place


def _reasons(entry: BackendEntry, request: Request, given_up: Reason | None) -> tuple[Reason, ...]:
    """Everything against ``entry`` running ``request``; ``given_up`` stands for a probe not to be
    tried again.
    """
    if entry.spec is None:
        assert entry.reason is not None  # an entry has one or the other
        return (entry.reason,)
    reasons = []
    slot = entry.spec.slots.get(request.slot)
    if slot is None:
        return (Reason("slot_not_offered", f"does not offer {request.slot}"),)
    if request.phase == "decode" and slot.decode is None and request.slot != "combine":
        reasons.append(
            Reason(
                "no_decode",
                f"has no decode form of {request.slot}",
                "use another backend to decode",
            )
        )
    if request.needs_grad and slot.backward is None and DIFFERENTIABLE[request.slot]:
        reasons.append(
            Reason(
                "no_backward", f"has no backward for {request.slot}", "use another backend to train"
            )
        )
    return (*reasons, *([given_up] if given_up else _probe(entry, entry.spec.probe, request)))


def _rank(
    entry: BackendEntry, request: Request, reasons: tuple[Reason, ...]
) -> tuple[int, tuple[Reason, ...]]:
    """Where ``entry`` stands for ``request``, highest first, and ``reasons``, with one more where
    its rank fails.
    """
    if entry.spec is None:
        return 0, reasons
    stated = entry.spec.priority_of(request.slot)
    if reasons or entry.spec.rank is None:
        return stated, reasons
    hint = report_hint(entry.distribution)
    try:
        rank = _call_limited(import_named(entry.spec.rank), request)
    except (Exception, SystemExit) as error:  # noqa: BLE001  plugins are other people's code
        text = f"its rank raised {describe_error(error)}"
        return stated, (Reason("rank_raised", text, hint),)
    if type(rank) is not int:
        text = f"its rank returned {type(rank).__name__}, not an integer"
        return stated, (Reason("rank_nonsense", text, hint),)
    return rank, reasons


def details(entry: BackendEntry) -> list[str]:
    """What ``entry``'s backend says of itself on this machine, a line each; what goes wrong in
    asking is a line too.
    """
    if entry.spec is None or entry.spec.detail is None:
        return []
    try:
        return [one_line(text) for text in _call_limited(import_named(entry.spec.detail))]
    except _TooSlowError:
        return [f"its detail did not come within {PROBE_LIMIT_S:g} s"]
    except (Exception, SystemExit) as error:  # noqa: BLE001  plugins are other people's code
        return [f"its detail raised {describe_error(error)}"]


class _TooSlowError(Exception):
    """The probe did not answer in time."""


def _probe(entry: BackendEntry, path: str, request: Request) -> tuple[Reason, ...]:
    """What ``entry``'s probe, at ``path``, says; whatever goes wrong inside it is a reason too."""
    hint = report_hint(entry.distribution)
    try:
        answer = _call_limited(import_named(path), request)
    except _TooSlowError:
        text = f"its probe did not answer within {PROBE_LIMIT_S:g} s"
        return (Reason("probe_too_slow", text, hint),)
    except (Exception, SystemExit) as error:  # noqa: BLE001  plugins are other people's code
        text = f"its probe raised {describe_error(error)}"
        return (Reason("probe_raised", text, hint),)
    if not isinstance(answer, (list, tuple)) or not all(map(is_reason, answer)):
        text = f"its probe returned {type(answer).__name__}, not a list of Reasons"
        return (Reason("probe_nonsense", text, hint),)
    return tuple(answer)


def _call_limited(probe: Any, *arguments: Any) -> Any:
    """``probe(*arguments)`` in a thread of its own, left behind when it does not answer within
    PROBE_LIMIT_S.
    """
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((probe(*arguments), None))
        except BaseException as error:  # noqa: BLE001  handed to the asking thread
            answers.put((None, error))

    threading.Thread(target=ask, name="nsa-probe", daemon=True).start()
    try:
        answer, error = answers.get(timeout=PROBE_LIMIT_S)
    except queue.Empty:
        raise _TooSlowError from None
    if error is not None:
        raise error
    return answer
