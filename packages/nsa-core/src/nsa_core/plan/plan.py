"""Plans: the kernel of every slot (Plan, resolve), or of one slot (SlotPlan, resolve_slot)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS, Request, SlotSpec
from nsa_core.errors import InvalidInput, NSAError, Unsupported
from nsa_core.plan.candidates import Candidates, describe_request, find_candidates
from nsa_core.plan.choosing import (
    Choice,
    SlotKernel,
    choose,
    fused_forms,
    fused_names,
    with_causal,
)
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.registry import Registry, default_registry
from nsa_core.torch_ops.call_wrapper import import_function
from nsa_core.torch_ops.core_kernels import CoreConstants, causal_geometry, constants_of
from nsa_core.util.global_state import SETTINGS, loading
from nsa_core.util.text import describe_error, one_line


def describe_causal(longest: int) -> str:
    """Return one line about sel in sequences of at most ``longest`` tokens (Plan.causal_up_to)."""
    return f"up to n l' = {longest} tokens: causal attention by the backend of win, without select"


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
            its fused backward, in which another backend may run cmp (SlotSpec.reads_lse).
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
    _fused_workspace: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
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

    def __str__(self) -> str:
        """Return a line about the request and one per slot; :meth:`explain` adds the reasons."""
        chosen = [_explain_choice(choice)[0] for choice in self.choices.values()]
        return "\n".join([describe_request(self.requests["cmp"]), *chosen, *self._fused_lines()])

    def _fused_lines(self) -> list[str]:
        cmp, lines = self.choices["cmp"].backend, []
        for name, kernel in self.fused.items():
            others = "" if kernel.backend == cmp else f", cmp by {one_line(cmp)}"
            lines.append(f"{name}: {one_line(kernel.backend)} (fused{others})")
        return lines

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
        return "\n".join([*lines, *self._fused_lines()])

    def workspace_bytes(self, request: Request, *, fused: str | None = None) -> int:
        """Return the peak memory of a slot or a fused form beyond its inputs, in bytes.

        Args:
            request: The request to size, with batch and seq_len set. Usually one of ``requests``,
                changed by ``dataclasses.replace``.
            fused: None: size the slot of ``request``, forward and, with needs_grad, backward. A
                name in ``Plan.fused``: size this form; the slot of ``request`` is ignored. The size
                of "backward" includes o_cmp, o_sel and o_win until it frees them.

        Raises:
            InvalidInput: batch or seq_len is None, or the plan has no form ``fused`` that runs the
                request.
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
        subject, path = self._workspace_of(request, fused)
        name = (self.choices[request.slot] if fused is None else self.fused[fused]).backend
        if path is None:
            raise Unsupported(f"backend {name!r} does not state the workspace of {subject}")
        try:
            with loading(name, SETTINGS):
                size = import_function(name, path)(request)
        except NSAError:
            raise
        except Exception as error:
            text = f"backend {name!r}, workspace of {subject}: {describe_error(error)}"
            raise NSAError(text) from error
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise NSAError(
                f"backend {name!r}, workspace of {subject}: {size!r} is not a number of bytes"
            )
        return size

    def _workspace_of(self, request: Request, fused: str | None) -> tuple[str, str | None]:
        """Return the subject of workspace_bytes in words, and the path of its function."""
        if fused is not None:
            names = [name for name in self.fused if name in fused_names(request)]
            if fused not in names:
                raise InvalidInput(
                    f"workspace_bytes: fused must be {' or '.join([*map(repr, names), 'None'])},"
                    f" got {fused!r}: the plan has no such form for a request with"
                    f" phase={request.phase!r}, needs_grad={request.needs_grad} and"
                    f" partial={request.partial}"
                )
            return f"the fused {fused!r}", self._fused_workspace.get(fused)
        slot = self._slots[request.slot]
        if request.phase == "decode" and request.slot != "combine":
            return f"the decode form of {request.slot!r}", slot.decode_workspace
        return repr(request.slot), slot.workspace

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
        from nsa_core.plan.warmup import warm

        target = torch.device(self.requests["cmp"].device if device is None else device)
        if target.type != self.requests["cmp"].device:
            raise InvalidInput(
                f"warmup: the plan is for {self.requests['cmp'].device}, got {target}"
            )
        kernels = {slot: getattr(self, slot) for slot in SLOTS}
        warm(kernels, self.fused, self.requests, self._slots, self.config, target)

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
    reason = f", {choice.why}" if choice.why else ""
    chosen_by = "asked for" if choice.explicit else f"auto{reason}"
    title = f"{one_line(choice.backend)} {one_line(choice.version)}"
    others = [c for c in choice.candidates if c.backend != choice.backend]
    return [f"{choice.slot}: {title} ({chosen_by})", *(f"  {c}" for c in others)]


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
            (:class:`nsa_core.plan.options.PlanOptions`); None: the defaults.
        registry: The registry of backends; None: the installed plugins.
        **fields: Fields of PlanOptions by name, which override those of ``options``: device,
            dtype, backends, needs_grad, deterministic, varlen, partial, phase, batch, seq_len,
            page_size, kv_dtype.

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
    choice, kernel = choose(all_candidates, [slot])[slot]
    return SlotPlan(config, all_candidates.requests[slot], choice, kernel)


def decide(all_candidates: Candidates) -> Plan:
    """Choose one of the candidates of each slot, and return the plan; raises as :func:`resolve`."""
    chosen = choose(all_candidates, SLOTS)
    choices = {slot: choice for slot, (choice, _) in chosen.items()}
    kernels = {slot: kernel for slot, (_, kernel) in chosen.items()}
    fused = fused_forms(all_candidates, choices)
    # The backward of all slots reads the blocks, and is faster than that of causal attention.
    if "backward" not in fused:
        kernels["sel"] = with_causal(all_candidates, kernels["sel"])
    specs = {slot: all_candidates.spec_of(choice.backend) for slot, choice in choices.items()}
    return Plan(
        all_candidates.config,
        all_candidates.requests,
        MappingProxyType(choices),
        _slots={slot: spec.slots[slot] for slot, spec in specs.items()},
        fused=MappingProxyType(fused),
        # No backend states the memory of a fused backward in which another one runs cmp.
        _fused_workspace=specs["sel"].fused_workspace if specs["sel"] is specs["cmp"] else {},
        **kernels,
    )
