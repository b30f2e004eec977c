"""The status of a backend and the sentence that states it: one function for every command.

`nsa backends list`, `show` and `explain` and `nsa doctor` print what
:func:`standing_of` returns, so that they never contradict each other. Importing this module does
not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nsa_core.contract import SLOTS
from nsa_core.plan.loading import BackendEntry
from nsa_core.plan.plugin_calls import FAULTS
from nsa_core.util.text import one_line

if TYPE_CHECKING:
    from nsa_core.plan.candidates import Candidate, Candidates
    from nsa_core.plan.gpus import GPU
    from nsa_core.plan.registry import Registry


@dataclasses.dataclass(frozen=True)
class Standing:
    """The status of a backend for a request.

    Attributes:
        status: One of loading.STATUSES.
        sentence: The slots that the backend runs, or the first reason why it runs none.
    """

    status: str
    sentence: str


def standing_of(entry: BackendEntry, by_slot: Mapping[str, Candidate]) -> Standing:
    """Return the status of ``entry`` and one sentence about it.

    A backend that was loaded is "ready" if it accepts the request in some slot. It is "broken" if
    it accepts none because its probe or its rank function fails, and "unavailable" if it refuses
    the request in every slot.

    Args:
        entry: The backend.
        by_slot: slot -> the backend's candidate for the request.
    """
    if entry.spec is None:
        assert entry.reason is not None  # an entry has either a spec or a reason
        return Standing(entry.status, one_line(entry.reason.message))
    slots = [slot for slot in SLOTS if slot in entry.spec.slots]
    accepted = [slot for slot in slots if by_slot[slot].accepted]
    reasons = [reason for slot in slots for reason in by_slot[slot].reasons]
    if not accepted:
        fault = next((reason for reason in reasons if reason.code in FAULTS), None)
        first = fault or reasons[0]
        status = "broken" if fault else "unavailable"
        return Standing(status, one_line(first.message))
    if accepted == list(SLOTS):
        return Standing("ready", "runs every slot")
    sentence = f"runs {', '.join(accepted)}"
    if reasons:
        refused = ", ".join(slot for slot in slots if slot not in accepted)
        sentence += f"; does not support {refused}: {one_line(reasons[0].message)}"
    return Standing("ready", sentence)


def standings(candidates: Candidates) -> dict[tuple[str, str], Standing]:
    """Return (name, distribution) -> the standing of each backend for the request."""
    return {
        (entry.name, entry.distribution): standing_of(entry, candidates.of(entry))
        for entry in candidates.registry.entries
    }


def typical_candidates(
    registry: Registry, phase: str = "prefill", gpu: GPU | None = None
) -> Candidates:
    """Return the candidates for a typical request: 12 query heads, 2 kv heads, Dk = Dv = 64.

    Args:
        registry: The backends.
        phase: Phase of the request.
        gpu: The GPU to simulate; None: the GPU of this machine, or its CPU if it has none.
    """
    import torch

    from nsa_core.config import NSAConfig
    from nsa_core.plan.candidates import find_candidates
    from nsa_core.plan.options import PlanOptions

    on_gpu = gpu is not None or torch.cuda.is_available()
    device, dtype = ("cuda", "bfloat16") if on_gpu else ("cpu", "float32")
    options = PlanOptions(device=device, dtype=dtype, phase=phase)
    return find_candidates(NSAConfig(768, 12, 2), options, registry=registry, gpu=gpu)
