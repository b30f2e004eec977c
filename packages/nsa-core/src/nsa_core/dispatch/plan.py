"""resolve: choose a backend for every slot, and return an immutable Plan of their kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import FUSED_DECODE, SLOTS, Reason, Request, SlotSpec, import_named
from nsa_core.dispatch.candidates import Candidates, find_candidates
from nsa_core.dispatch.options import PlanOptions
from nsa_core.dispatch.probing import Candidate, reasons_against
from nsa_core.dispatch.registry import Registry, default_registry
from nsa_core.errors import BackendUnavailable, InvalidInput, NSAError, Unsupported
from nsa_core.torch_ops.core_backward import core_backward
from nsa_core.torch_ops.core_kernels import (
    CoreConstants,
    causal_geometry,
    causal_kernel,
    constants_of,
)
from nsa_core.torch_ops.decode_kernel import DecodeKernel, decode_kernel
from nsa_core.torch_ops.slot_op import Kernel, slot_op
from nsa_core.util.interruption import is_ctrl_c
from nsa_core.util.plugin_output import stdout_to_stderr
from nsa_core.util.text import describe_error, one_line

_log = logging.getLogger("nsa")
_logged: set[tuple[str, ...]] = set()
_logged_lock = threading.Lock()
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


# A Kernel. In a plan for decode, a DecodeKernel for every slot except combine.
SlotKernel = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The kernel of each slot, chosen by :func:`nsa_core.resolve`.

    A plan is immutable. copy() and deepcopy() return the plan itself. Unpickling resolves a new
    plan from the same configuration, options and explicitly chosen backends.

    Attributes:
        config: Configuration of the layer.
        requests: slot -> the request that the backend accepted.
        choices: slot -> the chosen backend, and all candidates.
        cmp: Kernel of the compressed branch.
        select: Kernel that selects blocks.
        sel: Kernel of the selected branch.
        win: Kernel of the sliding-window branch.
        combine: Kernel of the gated sum (Eq. 5).
        fused: Name of a fused form (contract.FUSED) -> its kernel. Empty unless one backend runs
            every slot. A plan for decode has the decode forms of this backend, a plan with backward
            its fused backward.
        core: The plan as strings and numbers, for the operator of the whole core. None if the slots
            cannot run as one operator: a slot has no backward, or its kernel is wrapped.
    """

    config: NSAConfig
    requests: Mapping[str, Request]
    choices: Mapping[str, Choice]
    cmp: SlotKernel
    select: SlotKernel
    sel: SlotKernel
    win: SlotKernel
    combine: SlotKernel
    _slots: Mapping[str, SlotSpec] = dataclasses.field(repr=False)
    fused: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    core: CoreConstants | None = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        kernels = [getattr(self, slot) for slot in SLOTS]
        object.__setattr__(self, "core", constants_of(kernels, self.fused.get("backward")))

    @property
    def causal_sel(self) -> SlotKernel | None:
        """The kernel that replaces select and sel in short sequences, see Kernel.causal."""
        return getattr(self.sel, "causal", None)

    @property
    def causal_up_to(self) -> int | None:
        """The longest sequence in which that kernel runs, in tokens; None if select always runs."""
        if self.causal_sel is None:
            return None
        return causal_geometry(self.requests["sel"].geometry).window_size

    def explain(self) -> str:
        """Describe the plan: the request, and each slot's backend and other candidates.

        Returns:
            Plain text of several lines. Each other candidate is listed with its reasons. A line
            states the length up to which sel is causal attention and select does not run.
        """
        lines = [describe_request(self.requests["cmp"])]
        for choice in self.choices.values():
            chosen, *others = _explain_choice(choice)
            lines.append(chosen)
            if choice.slot == "sel" and self.causal_up_to is not None:
                lines.append(f"  {describe_causal(self.causal_up_to)}")
            lines += others
        lines += [
            f"{name}: {one_line(kernel.backend)} (fused)" for name, kernel in self.fused.items()
        ]
        return "\n".join(lines)

    def workspace_bytes(self, request: Request) -> int:
        """Return the peak memory of a slot beyond its inputs, in bytes.

        Args:
            request: The request to size, with batch and seq_len set. Usually one of ``requests``,
                changed by ``dataclasses.replace``.

        Raises:
            InvalidInput: batch or seq_len is None.
            Unsupported: The backend does not state its workspace.
            NSAError: The backend's workspace function failed or did not return a size.
        """
        missing = [
            f"{n} must be >= 0, got None"
            for n in ("batch", "seq_len")
            if getattr(request, n) is None
        ]
        if missing:
            raise InvalidInput("workspace_bytes: " + "; ".join(missing))
        name, spec = self.choices[request.slot].backend, self._slots[request.slot]
        is_decode_form = request.phase == "decode" and request.slot != "combine"
        path = spec.decode_workspace if is_decode_form else spec.workspace
        if path is None:
            form = "the decode form of " if is_decode_form else ""
            raise Unsupported(
                f"backend {name!r} does not state the workspace of {form}{request.slot!r}"
            )
        try:
            size = import_named(path)(request)
        except NSAError:
            raise
        except Exception as error:
            text = f"backend {name!r}, workspace of {request.slot!r}: {describe_error(error)}"
            raise NSAError(text) from error
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise NSAError(
                f"backend {name!r}, workspace of {request.slot!r}: {size!r} is not a number of"
                " bytes"
            )
        return size

    def warmup(self, device: str | torch.device | None = None) -> None:
        """Compile the plan's kernels by running every slot once on a few tokens.

        A plan for prefill runs the forward, and the backward if it was planned. A plan for decode
        runs its decode forms and fused forms for one token over a small cache. To reserve memory
        for the longest step of a cache, call cache.reserve_workspace(). A kernel of this project
        is one binary for all lengths, so that the first real step compiles nothing.

        Args:
            device: Device to run on, of the device type that the plan is for; None: the current
                one.

        Raises:
            InvalidInput: ``device`` has another type than the plan's device.
            NSAError: A kernel failed; the message names it.
        """
        from nsa_core.dispatch.warmup import warm

        target = torch.device(self.requests["cmp"].device if device is None else device)
        if target.type != self.requests["cmp"].device:
            raise InvalidInput(
                f"warmup: the plan is for {self.requests['cmp'].device}, got {target}"
            )
        kernels = {slot: getattr(self, slot) for slot in SLOTS}
        warm(kernels, self.fused, self.requests, self._slots, self.config.softmax_scale, target)

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (resolve, (self.config, _options_of(self.requests["cmp"], self.choices)))


@dataclasses.dataclass(frozen=True, eq=False)
class SlotPlan:
    """The kernel of one slot, chosen by :func:`resolve_slot`; immutable and copied as a Plan is.

    Attributes:
        config: The sizes that it was chosen for.
        request: The request that the backend accepted.
        choice: The chosen backend, and all candidates.
        kernel: The kernel.
    """

    config: NSAConfig
    request: Request
    choice: Choice
    kernel: SlotKernel

    def options(self) -> PlanOptions:
        """Return the options that give this plan again."""
        return _options_of(self.request, {self.request.slot: self.choice})

    def explain(self) -> str:
        """Describe the plan as :meth:`Plan.explain` does."""
        return "\n".join([describe_request(self.request), *_explain_choice(self.choice)])

    def __copy__(self) -> SlotPlan:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SlotPlan:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (resolve_slot, (self.config, self.request.slot, self.options()))


def _options_of(request: Request, choices: Mapping[str, Choice]) -> PlanOptions:
    """Return the options of a plan: those of ``request``, and the backends chosen by name."""
    explicit = {slot: choice.backend for slot, choice in choices.items() if choice.explicit}
    names = {field.name for field in dataclasses.fields(PlanOptions)} - {"backends"}
    return PlanOptions(backends=explicit, **{name: getattr(request, name) for name in names})


def _explain_choice(choice: Choice) -> list[str]:
    """Return a line about the chosen backend, and one for each other candidate."""
    why = f"tuned: {choice.tuned}" if choice.tuned else one_line(choice.rank_reason)
    chosen_by = "asked for" if choice.explicit else "auto" + (f", {why}" if why else "")
    title = f"{one_line(choice.backend)} {one_line(choice.version)}"
    others = [c for c in choice.candidates if c.backend != choice.backend]
    return [f"{choice.slot}: {title} ({chosen_by})", *(f"  {c}" for c in others)]


def _size(value: int | None) -> str:
    return "?" if value is None else str(value)


def describe_causal(longest: int) -> str:
    """Return one line about sel in sequences of at most ``longest`` tokens (Plan.causal_up_to)."""
    return f"up to n l' = {longest} tokens: causal, kernel of win, no select"


def describe_request(request: Request) -> str:
    """Return the request as one line: sizes under the contract's symbols, dtype, device, flags.

    A request of sel has the sizes that it depends on, any other one those of a layer.
    """
    g = request.geometry
    blocks = f"l'={g.select_block_size} n={g.num_selected_blocks}"
    if request.slot != "sel":
        blocks = f"l={g.compress_block_size} d={g.compress_stride} {blocks} w={g.window_size}"
    shape = (
        f"B={_size(request.batch)} S={_size(request.seq_len)} Hq={request.n_heads}"
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
    }
    flags = [flag for flag, holds in conditions.items() if holds]
    return ", ".join([shape, f"{request.dtype} on {device}", request.phase, *flags])


def resolve(
    config: NSAConfig,
    options: PlanOptions | None = None,
    *,
    registry: Registry | None = None,
    **fields: Any,
) -> Plan:
    """Choose the backend of each slot.

    Args:
        config: Configuration of the layer.
        options: The other choices about the plan
            (:class:`nsa_core.dispatch.options.PlanOptions`); None: the defaults.
        registry: The registry of backends; None: the installed plugins.
        **fields: Fields of PlanOptions by name, which override those of ``options``: device,
            dtype, backends, needs_grad, deterministic, varlen, partial, phase, batch, seq_len,
            page_size.

    Returns:
        A plan with a kernel for every slot.

    Raises:
        InvalidInput: An argument is wrong for every backend, or names an unknown backend or slot;
            the message suggests a similar name.
        BackendUnavailable: A backend chosen by name is not ready or its kernels cannot be imported,
            or no backend is ready.
        Unsupported: A backend chosen by name refuses its request, or all backends refuse one; the
            message lists every reason.

    Example:
        >>> plan = resolve(NSAConfig(768, 12, 2), device="cpu", dtype="float32", needs_grad=True)
    """
    options = dataclasses.replace(options or PlanOptions(), **fields)
    registry = default_registry() if registry is None else registry
    return decide(find_candidates(config, options, registry=registry))


def resolve_slot(
    config: NSAConfig,
    slot: str,
    options: PlanOptions | None = None,
    *,
    registry: Registry | None = None,
    **fields: Any,
) -> SlotPlan:
    """Choose the backend of one slot, whatever backends say about the others.

    Arguments and errors are those of :func:`resolve`.
    """
    options = dataclasses.replace(options or PlanOptions(), **fields)
    registry = default_registry() if registry is None else registry
    all_candidates = find_candidates(config, options, registry=registry)
    outcomes = {slot: _decide_slot(all_candidates, slot)}
    choice, kernel = _choose(all_candidates, outcomes)[slot]
    _log_once(all_candidates, {slot: choice})
    return SlotPlan(config, all_candidates.requests[slot], choice, kernel)


def decide(all_candidates: Candidates) -> Plan:
    """Choose one of the candidates of each slot, and return the plan; raises as :func:`resolve`."""
    outcomes = {slot: _decide_slot(all_candidates, slot) for slot in SLOTS}
    chosen = _choose(all_candidates, outcomes)
    choices = {slot: choice for slot, (choice, _) in chosen.items()}
    kernels = {slot: kernel for slot, (_, kernel) in chosen.items()}
    fused = MappingProxyType(_fused(all_candidates, choices))
    # The backward of all slots reads the blocks, and is faster than that of causal attention.
    if "backward" not in fused:
        kernels["sel"] = _with_causal(all_candidates, kernels["sel"])
    slots = {}
    for slot, choice in choices.items():
        spec = all_candidates.registry.get(choice.backend).spec
        assert spec is not None  # an accepted candidate is ready
        slots[slot] = spec.slots[slot]
    _log_once(all_candidates, choices)
    frozen = (MappingProxyType(choices), MappingProxyType(slots))
    return Plan(
        all_candidates.config,
        all_candidates.requests,
        frozen[0],
        _slots=frozen[1],
        fused=fused,
        **kernels,
    )


def _choose(
    all_candidates: Candidates, outcomes: Mapping[str, _Outcome]
) -> dict[str, tuple[Choice, SlotKernel]]:
    """Return the choice and the kernel of each slot of ``outcomes``; raises as :func:`resolve`."""
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


def _kernel(all_candidates: Candidates, slot: str, backend: str) -> Kernel | DecodeKernel:
    """Return the kernel of ``slot`` from ``backend``; passes on any exception of its imports."""
    entry, request = all_candidates.registry.get(backend), all_candidates.requests[slot]
    assert entry.spec is not None  # an accepted candidate is ready
    slot_spec = entry.spec.slots[slot]
    with contextlib.nullcontext() if entry.first_party else stdout_to_stderr():
        if request.phase == "decode" and slot_spec.decode is not None:
            return decode_kernel(backend, slot, slot_spec.decode)
        op = slot_op(backend, slot, slot_spec).op
    scale, geometry = all_candidates.config.softmax_scale, tuple(request.geometry.as_ints())
    partial = request.partial and slot != "combine"
    return Kernel(backend, slot, op, scale, geometry, request.deterministic, partial)


def _with_causal(all_candidates: Candidates, sel: SlotKernel) -> SlotKernel:
    """Return the kernel of sel with its causal kernel, if its backend takes the request for it."""
    request = all_candidates.requests["win"]
    if request.phase == "decode" or request.partial:
        return sel
    request = dataclasses.replace(request, geometry=causal_geometry(request.geometry))
    entry = all_candidates.registry.get(sel.backend)
    if reasons_against(entry, request):
        return sel
    assert entry.spec is not None  # a backend without reasons against it is ready
    try:
        with contextlib.nullcontext() if entry.first_party else stdout_to_stderr():
            win = slot_op(sel.backend, "win", entry.spec.slots["win"])
    except BaseException as failure:  # a plugin may raise anything
        if is_ctrl_c(failure):
            raise
        return sel
    return dataclasses.replace(sel, causal=causal_kernel(sel, win))


def _fused(all_candidates: Candidates, choices: Mapping[str, Choice]) -> dict[str, Any]:
    """Return the fused forms for the plan if one backend runs every slot; else {}."""
    names = {choice.backend for choice in choices.values()}
    spec = all_candidates.registry.get(names.pop()).spec if len(names) == 1 else None
    if spec is None:
        return {}
    request, forms = all_candidates.requests["cmp"], spec.fused.items()
    if request.phase == "decode":
        return {
            name: decode_kernel(spec.name, name, path)
            for name, path in forms
            if name in FUSED_DECODE
        }
    if request.needs_grad and not request.partial and "backward" in spec.fused:
        return {"backward": core_backward(spec.name, spec.fused["backward"])}
    return {}


_Outcome = tuple[tuple[Candidate, Any] | None, tuple[Candidate, ...], type[NSAError] | None]


def _decide_slot(all_candidates: Candidates, slot: str) -> _Outcome:
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
            text = f"its kernel does not load: {describe_error(failure)}"
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


def _log_once(all_candidates: Candidates, choices: Mapping[str, Choice]) -> None:
    """Log the choices of `auto`, once per device, dtype and set of choices."""
    chosen = {slot: f"{c.backend} {c.version}" for slot, c in choices.items() if not c.explicit}
    request = _request_of(all_candidates, choices)
    key = (
        request.device,
        request.dtype,
        *(f"{slot}: {one_line(name)}" for slot, name in chosen.items()),
    )
    with _logged_lock:
        if not chosen or key in _logged:
            return
        _logged.add(key)
    _log.info("auto chose %s (%s)", ", ".join(key[2:]), describe_request(request))
