"""Ask a backend's probe and rank about a request. Every failure in them is a reason against it."""

from __future__ import annotations

import dataclasses

from nsa_core.contract import Rank, Reason, Request
from nsa_core.plan.loading import BackendEntry
from nsa_core.plan.plugin_calls import PluginFault, ask, call_detail, call_probe, call_rank
from nsa_core.torch_ops.schema import DIFFERENTIABLE
from nsa_core.util.text import one_line


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
        return f"{title}: {'refused' if self.status == 'ready' else self.status}: {reasons}"


def probe_candidate(entry: BackendEntry, request: Request) -> Candidate:
    """Return ``entry`` as a candidate for ``request``, whose device need not exist here."""
    return Candidate(entry.name, entry.version, entry.status, reasons_against(entry, request))


def reasons_against(entry: BackendEntry, request: Request) -> tuple[Reason, ...]:
    """Return every reason against running ``request`` on ``entry``."""
    if entry.spec is None:
        assert entry.reason is not None  # an entry has either a spec or a reason
        return (entry.reason,)
    reasons = []
    slot = entry.spec.slots.get(request.slot)
    if slot is None:
        return (Reason("slot_not_offered", f"does not offer {request.slot}"),)
    if request.partial and not slot.partial and request.slot != "combine":
        text = f"does not take queries that begin inside a sequence in {request.slot}"
        return (Reason("no_partial", text, "pass whole sequences, or use another backend"),)
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
    try:
        return (*reasons, *ask(entry, "probe", call_probe, entry.spec.probe, request))
    except PluginFault as fault:
        return (*reasons, _reason(entry, "probe", fault))


def rank_of(
    entry: BackendEntry, request: Request, reasons: tuple[Reason, ...]
) -> tuple[Rank, tuple[Reason, ...]]:
    """Return the rank of ``entry`` for ``request``, and the reasons against it.

    The reasons are ``reasons``, or the failure of the backend's rank function. `auto` prefers the
    highest rank.
    """
    if entry.spec is None:
        return Rank(0), reasons
    priority = Rank(entry.spec.priority_of(request.slot))
    if reasons or entry.spec.rank is None:
        return priority, reasons
    try:
        return ask(entry, "rank function", call_rank, entry.spec.rank, request), reasons
    except PluginFault as fault:
        return priority, (_reason(entry, "rank", fault),)


def details(entry: BackendEntry) -> list[str]:
    """Return the lines of the backend's detail function; a failure of that function is a line."""
    if entry.spec is None or entry.spec.detail is None:
        return []
    try:
        lines = ask(entry, "detail function", call_detail, entry.spec.detail)
    except PluginFault as fault:
        return [str(fault)]
    return [one_line(text) for text in lines]


def _reason(entry: BackendEntry, what: str, fault: PluginFault) -> Reason:
    return Reason(f"{what}_{fault.fault}", str(fault), entry.report_hint)
