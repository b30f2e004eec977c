"""All semantic mutants, and healthy controls of the helpers that they are written with."""

from __future__ import annotations

from semantic import (
    cmp_faults,
    combine_faults,
    partial_faults,
    sel_faults,
    select_faults,
    shared_faults,
    win_faults,
)
from semantic.dense import cmp_mask, masked, masked_decode, sel_mask, selected, win_mask
from semantic.model import SemanticMutant, mutant

ALL: tuple[SemanticMutant, ...] = (
    *shared_faults.MUTANTS,
    *cmp_faults.MUTANTS,
    *select_faults.MUTANTS,
    *sel_faults.MUTANTS,
    *win_faults.MUTANTS,
    *combine_faults.MUTANTS,
    *partial_faults.MUTANTS,
)

_MASKS = {"cmp": cmp_mask, "sel": sel_mask, "win": win_mask}

# The dense helpers with the right masks: the checks must pass them, or kills would mean nothing.
CONTROLS: tuple[SemanticMutant, ...] = (
    *(
        mutant(slot, phase, "the right mask", lambda c, m=mask: masked(c, m))
        for slot, mask in _MASKS.items()
        for phase in ("forward", "backward")
    ),
    *(
        mutant(slot, "decode", "the right mask", lambda c, m=mask: masked_decode(c, m))
        for slot, mask in _MASKS.items()
    ),
    mutant("select", "forward", "the right choice", lambda c: selected(c)),
    mutant("select", "decode", "the right choice", lambda c: selected(c)),
    *partial_faults.CONTROLS,
)
