"""Choose the backend and the kernel of each slot among its candidates, or say why none can run."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from typing import Any

from nsa_core.contract import FUSED_DECODE, Reason, Request
from nsa_core.errors import BackendUnavailable, NSAError, Unsupported
from nsa_core.plan.candidates import Candidate, Candidates, describe_request, probe_candidate
from nsa_core.plan.plugin_calls import PluginFault, ask, import_kernel
from nsa_core.torch_ops.core_backward import core_backward
from nsa_core.torch_ops.core_kernels import causal_geometry, causal_kernel
from nsa_core.torch_ops.decode_kernel import decode_kernel
from nsa_core.torch_ops.kernel import Kernel
from nsa_core.torch_ops.slot_op import slot_op
from nsa_core.util.interruption import is_ctrl_c
from nsa_core.util.planning_lock import planning_lock
from nsa_core.util.text import describe_error, one_line

_log = logging.getLogger("nsa")
_logged: set[tuple[str, ...]] = set()
_NO_BACKEND = "no backend can be used; pip install nsa-backend-sdpa (runs on the CPU and CUDA GPUs)"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The backend that a plan uses for a slot, and all candidates.

    Attributes:
        slot: The slot.
        backend: Name of the backend.
        version: Version of its distribution.
        explicit: True if the caller chose the backend by name, False if `auto` chose it.
        candidates: One candidate per backend, in the order in which `auto` prefers them.
        tuned: The measurement of `nsa tune`, if it decided the choice; otherwise "".
    """

    slot: str
    backend: str
    version: str
    explicit: bool
    candidates: tuple[Candidate, ...]
    tuned: str = ""

    @property
    def rank_reason(self) -> str:
        """Return the reason that the chosen backend gives for its rank, or ""."""
        return next(c.rank_reason for c in self.candidates if c.backend == self.backend)

    @property
    def why(self) -> str:
        """Return why `auto` prefers the backend, on one line: its measurement, or its rank."""
        return one_line(f"tuned: {self.tuned}" if self.tuned else self.rank_reason)


# A Kernel. In a plan for decode, a DecodeKernel for every slot except combine.
SlotKernel = Any


@dataclasses.dataclass(frozen=True)
class KernelElsewhere:
    """A kernel that this process does not load.

    A plan in the plugin's child process has the kernel itself; a plan for a simulated GPU is only
    described.
    """

    backend: str
    slot: str
    causal: KernelElsewhere | None = None  # see Kernel

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        """Raise NSAError: this process cannot call the kernel."""
        raise NSAError(
            f"backend {self.backend!r}, slot {self.slot!r}: it runs in a child process, or on a GPU"
            " that is simulated here"
        )


def choose(
    all_candidates: Candidates, slots: Collection[str]
) -> dict[str, tuple[Choice, SlotKernel]]:
    """Choose the first usable candidate of each of ``slots``; log what `auto` chose.

    Returns:
        slot -> the choice, and the kernel.

    Raises:
        Unsupported, BackendUnavailable: As :func:`nsa_core.resolve`.
    """
    chosen: dict[str, tuple[Choice, SlotKernel]] = {}
    refused: dict[str, tuple[Candidate, ...]] = {}
    request = all_candidates.requests["cmp" if "cmp" in slots else next(iter(slots))]
    for slot in slots:
        candidate, kernel, candidates = _first_usable(all_candidates, slot)
        if candidate is None:
            refused[slot] = candidates
            continue
        explicit = all_candidates.chosen_by_name[slot] is not None
        is_auto_first = not explicit and candidates[0].backend == candidate.backend
        measurement = all_candidates.tuned.get(slot, "") if is_auto_first else ""
        name, version = candidate.backend, candidate.version
        chosen[slot] = Choice(slot, name, version, explicit, candidates, measurement), kernel
    if not refused:
        _log_once(request, {slot: choice for slot, (choice, _) in chosen.items()})
        return chosen
    text = _report(all_candidates, request, refused)
    if not any(_is_unavailable(all_candidates, slot) for slot in refused):
        raise Unsupported(text)
    unavailable_error = BackendUnavailable(text)
    unavailable_error.nothing_usable = not all_candidates.registry.ready()
    raise unavailable_error


def _first_usable(
    all_candidates: Candidates, slot: str
) -> tuple[Candidate | None, SlotKernel, tuple[Candidate, ...]]:
    """Return the first usable candidate of ``slot`` and its kernel, or None, and all candidates.

    A candidate whose kernel cannot be imported carries that failure as its reason.
    """
    name, candidates = all_candidates.chosen_by_name[slot], list(all_candidates.by_slot[slot])
    for index, candidate in enumerate(candidates):
        if name not in (None, candidate.backend) or not candidate.accepted:
            continue
        try:
            return candidate, _kernel(all_candidates, slot, candidate.backend), tuple(candidates)
        except BaseException as failure:  # a plugin may raise anything
            if is_ctrl_c(failure):
                raise
            cause = str(failure) if isinstance(failure, PluginFault) else describe_error(failure)
            text = f"its kernel does not load: {cause}"
            reason = Reason("kernel_import_failed", text, "reinstall the plugin")
            candidates[index] = dataclasses.replace(candidate, reasons=(reason,))
    return None, None, tuple(candidates)


def with_import_failures(all_candidates: Candidates) -> dict[str, tuple[Candidate, ...]]:
    """Return slot -> its candidates; a kernel that cannot be imported is a reason against one."""
    return {slot: _first_usable(all_candidates, slot)[2] for slot in all_candidates.by_slot}


def _is_unavailable(all_candidates: Candidates, slot: str) -> bool:
    """Return whether a slot without a usable candidate lacks a backend that works here.

    Otherwise backends refuse its request.
    """
    name, registry = all_candidates.chosen_by_name[slot], all_candidates.registry
    if name is None:
        return not registry.ready()
    # The kernel of a named backend that accepts the request does not load.
    accepts = any(c.accepted and c.backend == name for c in all_candidates.by_slot[slot])
    return accepts or registry.get(name).status != "ready"


def _kernel(all_candidates: Candidates, slot: str, backend: str) -> SlotKernel:
    """Return the kernel of ``slot`` from ``backend``; passes on any exception of its imports."""
    entry, request = all_candidates.registry.get(backend), all_candidates.requests[slot]
    slot_spec = all_candidates.spec_of(backend).slots[slot]
    decode = slot_spec.decode if request.phase == "decode" else None
    if entry.child is not None:
        functions = (decode,) if decode else (slot_spec.forward, slot_spec.backward)
        ask(entry, "kernel", import_kernel, *filter(None, functions))
        return KernelElsewhere(backend, slot)
    if backend in all_candidates.assumed:
        return KernelElsewhere(backend, slot)
    if decode is not None:
        return decode_kernel(backend, slot, decode)
    op = slot_op(backend, slot, slot_spec).op
    scale, geometry = all_candidates.config.softmax_scale, tuple(request.geometry.as_ints())
    partial = request.partial and slot != "combine"
    return Kernel(backend, slot, op, scale, geometry, request.deterministic, partial)


def with_causal(all_candidates: Candidates, sel: SlotKernel) -> SlotKernel:
    """Return the kernel of sel with its causal kernel, if its backend takes the request for it."""
    request = all_candidates.requests["win"]
    if request.phase == "decode" or request.partial:
        return sel
    request = dataclasses.replace(request, geometry=causal_geometry(request.geometry))
    entry = all_candidates.registry.get(sel.backend)
    assumed = all_candidates.assumed.get(sel.backend, frozenset())
    if not assumed.issuperset(probe_candidate(entry, request).reasons):
        return sel
    if isinstance(sel, KernelElsewhere):
        return dataclasses.replace(sel, causal=KernelElsewhere(sel.backend, "win"))
    try:
        win = slot_op(sel.backend, "win", all_candidates.spec_of(sel.backend).slots["win"])
    except BaseException as failure:  # a plugin may raise anything
        if is_ctrl_c(failure):
            raise
        return sel
    return dataclasses.replace(sel, causal=causal_kernel(sel, win))


def fused_forms(all_candidates: Candidates, choices: Mapping[str, Choice]) -> dict[str, Any]:
    """Return the fused forms for the plan if one backend runs every slot; else {}.

    The backward remains if another backend runs cmp, and its backward of cmp can join.
    """
    names = {slot: choice.backend for slot, choice in choices.items()}
    cmp, request = all_candidates.spec_of(names.pop("cmp")), all_candidates.requests["cmp"]
    spec = all_candidates.spec_of(names["sel"])
    joins = request.phase != "decode" and cmp.slots["cmp"].reads_lse
    if {*names.values()} != {spec.name} or not (cmp.name == spec.name or joins):
        return {}
    paths = {name: path for name, path in spec.fused.items() if name in fused_names(request)}
    for name in {cmp.name, spec.name}:
        if all_candidates.registry.get(name).child or name in all_candidates.assumed:
            return {form: KernelElsewhere(spec.name, form) for form in paths}
    if request.phase == "decode":
        return {name: decode_kernel(spec.name, name, path) for name, path in paths.items()}
    other = None if cmp.name == spec.name else slot_op(cmp.name, "cmp", cmp.slots["cmp"])
    return {name: core_backward(spec.name, path, other) for name, path in paths.items()}


def fused_names(request: Request) -> tuple[str, ...]:
    """Return the names of the fused forms that may run a request, whatever its slot."""
    if request.phase == "decode":
        return FUSED_DECODE
    return ("backward",) if request.needs_grad and not request.partial else ()


def _report(
    all_candidates: Candidates, request: Request, refused: Mapping[str, tuple[Candidate, ...]]
) -> str:
    """Return the error message: a summary, the request, and each refused slot's candidates.

    Of a slot with a named backend, these are the named one and those that accept the request. Slots
    whose candidates have the same reasons share one list of candidates.
    """
    named = {
        slot: one_line(name)
        for slot in refused
        if (name := all_candidates.chosen_by_name[slot]) is not None
    }
    sentences = [
        f"{name!r} cannot run {', '.join(s for s in named if named[s] == name)}"
        for name in {*named.values()}
    ]
    auto_slots = [slot for slot in refused if slot not in named]
    if auto_slots:
        sentences.append(
            f"no backend takes {', '.join(auto_slots)}"
            if all_candidates.registry.ready()
            else _NO_BACKEND
        )
    lines = [
        "; ".join(sorted(sentences)),
        f"  request: {describe_request(request)}",
    ]
    slots_by_answers: dict[tuple[str, ...], list[str]] = {}  # (named backend, *candidates) -> slots
    for slot, candidates in refused.items():
        asked = all_candidates.chosen_by_name[slot]
        listed = [c for c in candidates if asked in (None, c.backend) or c.accepted]
        rows = [f"    {candidate}" for candidate in listed] or ["    no backend is installed"]
        slots_by_answers.setdefault((named.get(slot, ""), *rows), []).append(slot)
    for (name, *rows), slots in slots_by_answers.items():
        lines += [f"  {', '.join(slots)}" + (f" (asked for {name!r}):" if name else ":"), *rows]
    return "\n".join(lines)


def _log_once(request: Request, choices: Mapping[str, Choice]) -> None:
    """Log the choices of `auto` and their reasons, once per device, dtype and set of choices.

    The reasons are those of the first request with these choices.
    """
    by_auto = {
        f"{slot}: {one_line(f'{choice.backend} {choice.version}')}": choice.why
        for slot, choice in choices.items()
        if not choice.explicit
    }
    key = (request.device, request.dtype, *by_auto)
    with planning_lock:
        if not by_auto or key in _logged:
            return
        _logged.add(key)
    described = ", ".join(f"{name} ({why})" if why else name for name, why in by_auto.items())
    _log.info("auto chose %s (%s)", described, describe_request(request))
