"""Combinations of backends: read from text, or all that are ready."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS
from nsa_core.dispatch.candidates import survey
from nsa_core.dispatch.registry import Registry
from nsa_core.errors import InvalidInput
from nsa_core.util.text import did_you_mean


@dataclasses.dataclass(frozen=True)
class Combo:
    """A named combination; a slot that ``backends`` leaves out is auto."""

    name: str
    backends: Mapping[str, str]


def parse_combo(text: str) -> Combo:
    """The combination that "win=sdpa,cmp=fa2", "sdpa" (every slot) or "auto" stands for.

    Raises:
        InvalidInput: an unknown slot, a slot named twice, or something that is no assignment.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if len(words) == 1 and "=" not in words[0]:
        return Combo(words[0], {} if words[0] == "auto" else dict.fromkeys(SLOTS, words[0]))
    backends: dict[str, str] = {}
    for word in words:
        slot, equals, name = (part.strip() for part in word.partition("="))
        if not equals or not name:
            raise InvalidInput(
                f"combo must be like win=sdpa,cmp=fa2 or one backend's name, got {text!r}"
            )
        if slot not in SLOTS:
            raise InvalidInput(f"combo {text!r}: unknown slot {slot!r}{did_you_mean(slot, SLOTS)}")
        if slot in backends:
            raise InvalidInput(f"combo {text!r} names slot {slot!r} twice")
        backends[slot] = name
    if not backends:
        raise InvalidInput("combo must not be empty")
    return Combo(
        ",".join(f"{slot}={backends[slot]}" for slot in SLOTS if slot in backends), backends
    )


def ready_combos(
    registry: Registry,
    config: NSAConfig,
    device: str,
    dtype: torch.dtype,
    needs_grad: bool,
    phase: str = "prefill",
    page_size: int | None = None,
) -> list[Combo]:
    """ "auto", and per ready backend the combination that uses it wherever it accepts; each
    assignment once.
    """
    answers = survey(
        config,
        device=device,
        dtype=dtype,
        needs_grad=needs_grad,
        phase=phase,
        page_size=page_size,
        registry=registry,
    )
    accepted = {slot: [c.backend for c in answers.candidates[slot] if c.accepted] for slot in SLOTS}
    best = {slot: names[0] for slot, names in accepted.items() if names}
    found = [Combo("auto", {})]
    seen = [best]
    for entry in registry.ready():
        mine = {slot: entry.name for slot in SLOTS if entry.name in accepted[slot]}
        if mine and best | mine not in seen:
            seen.append(best | mine)
            found.append(Combo(entry.name, mine))
    return found
