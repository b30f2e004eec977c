"""Choose the backend and the kernel of each slot among its candidates, or say why none can run."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
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
_NO_BACKEND = (
    "no backend can be used; pip install nsa-backend-sdpa (runs on the CPU and on any GPU)"
)


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
class KernelInChild:
    """A kernel of a plugin that runs in a child process: a plan there has the kernel itself."""

    backend: str
    slot: str
    causal: KernelInChild | None = None  # see Kernel

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        """Raise NSAError: this process cannot call the kernel."""
        raise NSAError(f"backend {self.backend!r}, slot {self.slot!r}: it runs in a child process")


# The chosen candidate and its kernel, all candidates, and the class of the error: decide_slot().
Outcome = tuple[tuple[Candidate, Any] | None, tuple[Candidate, ...], type[NSAError] | None]


def choose(
    all_candidates: Candidates, outcomes: Mapping[str, Outcome]
) -> dict[str, tuple[Choice, SlotKernel]]:
    """Return the choice and the kernel of each slot of ``outcomes``; raises as resolve()."""
    refused = {slot: error for slot, (_, _, error) in outcomes.items() if error is not None}
    if refused:
        request = _request_of(all_candidates, outcomes)
        text = _report(all_candidates, request, {slot: outcomes[slot][1] for slot in refused})
        if BackendUnavailable not in refused.values():
            raise Unsupported(text)
        unavailable_error = BackendUnavailable(text)
        unavailable_error.nothing_usable = not all_candidates.registry.ready()
        raise unavailable_error
    chosen: dict[str, tuple[Choice, SlotKernel]] = {}
    for slot, (first, candidates, _) in outcomes.items():
        assert first is not None  # a slot without an error has a chosen candidate
        candidate, kernel = first
        explicit = all_candidates.chosen_by_name[slot] is not None
        is_auto_first = not explicit and candidates[0].backend == candidate.backend
        measurement = all_candidates.tuned.get(slot, "") if is_auto_first else ""
        choice = Choice(
            slot, candidate.backend, candidate.version, explicit, candidates, measurement
        )
        chosen[slot] = choice, kernel
    return chosen


def _request_of(all_candidates: Candidates, slots: Mapping[str, object]) -> Request:
    """Return the request that stands for the planned ``slots`` in messages."""
    return all_candidates.requests["cmp" if "cmp" in slots else next(iter(slots))]


def _kernel(all_candidates: Candidates, slot: str, backend: str) -> SlotKernel:
    """Return the kernel of ``slot`` from ``backend``; passes on any exception of its imports."""
    entry, request = all_candidates.registry.get(backend), all_candidates.requests[slot]
    assert entry.spec is not None  # an accepted candidate is ready
    slot_spec = entry.spec.slots[slot]
    decode = slot_spec.decode if request.phase == "decode" else None
    if entry.child is not None:
        functions = (decode,) if decode else (slot_spec.forward, slot_spec.backward)
        ask(entry, "kernel", import_kernel, *filter(None, functions))
        return KernelInChild(backend, slot)
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
    if not probe_candidate(entry, request).accepted:
        return sel
    if isinstance(sel, KernelInChild):
        return dataclasses.replace(sel, causal=KernelInChild(sel.backend, "win"))
    assert entry.spec is not None  # a backend without reasons against it is ready
    try:
        win = slot_op(sel.backend, "win", entry.spec.slots["win"])
    except BaseException as failure:  # a plugin may raise anything
        if is_ctrl_c(failure):
            raise
        return sel
    return dataclasses.replace(sel, causal=causal_kernel(sel, win))


def fused_forms(all_candidates: Candidates, choices: Mapping[str, Choice]) -> dict[str, Any]:
    """Return the fused forms for the plan if one backend runs every slot; else {}."""
    names = {choice.backend for choice in choices.values()}
    entry = all_candidates.registry.get(names.pop()) if len(names) == 1 else None
    if entry is None or entry.spec is None:
        return {}
    spec, request = entry.spec, all_candidates.requests["cmp"]
    paths = {name: path for name, path in spec.fused.items() if name in fused_names(request)}
    if entry.child is not None:
        return {name: KernelInChild(spec.name, name) for name in paths}
    if request.phase == "decode":
        return {name: decode_kernel(spec.name, name, path) for name, path in paths.items()}
    return {name: core_backward(spec.name, path) for name, path in paths.items()}


def fused_names(request: Request) -> tuple[str, ...]:
    """Return the names of the fused forms that may run a request, whatever its slot."""
    if request.phase == "decode":
        return FUSED_DECODE
    return ("backward",) if request.needs_grad and not request.partial else ()


def decide_slot(all_candidates: Candidates, slot: str) -> Outcome:
    """Choose the first usable candidate of ``slot``.

    Returns:
        (chosen candidate and its kernel or None, all candidates, type of the error or None). A
        candidate whose kernel cannot be imported carries that failure as its reason.
    """
    name, candidates = all_candidates.chosen_by_name[slot], list(all_candidates.by_slot[slot])
    error: type[NSAError] = Unsupported
    if (
        not all_candidates.registry.ready()
        if name is None
        else all_candidates.registry.get(name).status != "ready"
    ):
        error = BackendUnavailable
    for index, candidate in enumerate(candidates):
        if name not in (None, candidate.backend) or not candidate.accepted:
            continue
        try:
            return (
                (candidate, _kernel(all_candidates, slot, candidate.backend)),
                tuple(candidates),
                None,
            )
        except BaseException as failure:  # a plugin may raise anything
            if is_ctrl_c(failure):
                raise
            cause = str(failure) if isinstance(failure, PluginFault) else describe_error(failure)
            text = f"its kernel does not load: {cause}"
            reason = Reason("kernel_import_failed", text, "reinstall the plugin")
            candidates[index] = dataclasses.replace(candidate, reasons=(reason,))
            error = BackendUnavailable if name else error
    return None, tuple(candidates), error


def _report(
    all_candidates: Candidates, request: Request, refused: Mapping[str, tuple[Candidate, ...]]
) -> str:
    """Return the error message: a summary, the request, and each refused slot's candidates.

    Slots whose candidates have the same reasons share one list of candidates.
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
        rows = [f"    {candidate}" for candidate in candidates] or ["    no backend is installed"]
        slots_by_answers.setdefault((named.get(slot, ""), *rows), []).append(slot)
    for (name, *rows), slots in slots_by_answers.items():
        lines += [f"  {', '.join(slots)}" + (f" (asked for {name!r}):" if name else ":"), *rows]
    return "\n".join(lines)


def log_once(all_candidates: Candidates, choices: Mapping[str, Choice]) -> None:
    """Log the choices of `auto` and their reasons, once per device, dtype and set of choices.

    The reasons are those of the first request with these choices.
    """
    chosen = {slot: f"{c.backend} {c.version}" for slot, c in choices.items() if not c.explicit}
    request = _request_of(all_candidates, choices)
    key = (
        request.device,
        request.dtype,
        *(f"{slot}: {one_line(name)}" for slot, name in chosen.items()),
    )
    with planning_lock:
        if not chosen or key in _logged:
            return
        _logged.add(key)
    reasons = (f" ({why})" if (why := choices[slot].why) else "" for slot in chosen)
    described = ", ".join(map("".join, zip(key[2:], reasons)))
    _log.info("auto chose %s (%s)", described, describe_request(request))
