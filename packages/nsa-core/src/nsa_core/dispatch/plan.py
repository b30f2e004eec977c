"""resolve: a configuration, a device and a dtype in; an immutable Plan that names the kernel of
every slot out.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS, Reason, Request, SlotSpec, import_named
from nsa_core.dispatch.candidates import Candidates, find_candidates
from nsa_core.dispatch.options import PlanOptions
from nsa_core.dispatch.probing import Candidate
from nsa_core.dispatch.registry import Registry, default_registry
from nsa_core.errors import BackendUnavailable, InvalidInput, NSAError, Unsupported
from nsa_core.torch_ops.decode_kernel import DecodeKernel, decode_kernel
from nsa_core.torch_ops.slot_op import Kernel, slot_op
from nsa_core.util.text import describe_error, one_line

_log = logging.getLogger("nsa")
_said: set[tuple[str, ...]] = set()
_said_lock = threading.Lock()
_NO_BACKEND = (
    "no backend can be used; pip install nsa-backend-sdpa (runs on the CPU and on any GPU)"
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Who runs a slot, and everyone who was considered."""

    slot: str
    backend: str
    version: str
    explicit: bool  # asked for by name, not chosen by `auto`
    candidates: tuple[Candidate, ...]
    tuned: str = ""  # what `nsa tune` measured, where that decided


SlotKernel = Any  # a Kernel; in a plan for decode a DecodeKernel, but for combine


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Who runs each slot. Immutable; a copy is the same plan, and a pickled one is resolved anew
    where it is loaded.
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
    # of contract.FUSED, decode only
    fused: Mapping[str, DecodeKernel] = dataclasses.field(default_factory=dict)

    def explain(self) -> str:
        """The request, and per slot who runs it and why nobody else does; plain text of several
        lines.
        """
        lines = [describe_request(self.requests["cmp"])]
        for slot, choice in self.choices.items():
            how = (
                "asked for"
                if choice.explicit
                else "auto" + (f", tuned: {choice.tuned}" if choice.tuned else "")
            )
            lines.append(f"{slot}: {one_line(choice.backend)} {one_line(choice.version)} ({how})")
            lines += [
                f"  {candidate}"
                for candidate in choice.candidates
                if candidate.backend != choice.backend
            ]
        lines += [
            f"{name}: {one_line(kernel.backend)} (fused)" for name, kernel in self.fused.items()
        ]
        return "\n".join(lines)

    def workspace_bytes(self, request: Request) -> int:
        """Peak bytes that the backend of ``request.slot`` takes beyond its inputs.

        ``request`` is usually one of ``requests`` with batch and seq_len set
        (``dataclasses.replace``).

        Raises:
            InvalidInput: batch or seq_len is not given.
            Unsupported: the backend does not state its workspace.
            NSAError: the backend's function failed or returned no size.
        """
        wrong = [
            f"{n} must be >= 0, got None"
            for n in ("batch", "seq_len")
            if getattr(request, n) is None
        ]
        if wrong:
            raise InvalidInput("workspace_bytes: " + "; ".join(wrong))
        name, spec = self.choices[request.slot].backend, self._slots[request.slot]
        step = request.phase == "decode" and request.slot != "combine"
        path = spec.decode_workspace if step else spec.workspace
        if path is None:
            form = "the decode form of " if step else ""
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
        """Compile what a first step would, by running every slot on a few tokens; forward, and
        backward if planned.

        A plan for decode runs its decode and fused forms for a token, on a small cache; a cache's
        own longest step is cache.reserve_workspace()'s. ``device``: one of the plan's kind, by
        default the current one. Kernels of our own are one binary for every length, so nothing is
        left to compile at the first real step.

        Raises:
            InvalidInput: ``device`` is of another kind than the plan's.
            NSAError: a kernel failed; the message names it.
        """
        from nsa_core.dispatch.warmup import warm

        place = torch.device(self.requests["cmp"].device if device is None else device)
        if place.type != self.requests["cmp"].device:
            raise InvalidInput(
                f"warmup: the plan is for {self.requests['cmp'].device}, got {place}"
            )
        kernels = {slot: getattr(self, slot) for slot in SLOTS}
        warm(kernels, self.fused, self.requests, self._slots, self.config.softmax_scale, place)

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        asked = self.requests["cmp"]
        explicit = {
            slot: choice.backend for slot, choice in self.choices.items() if choice.explicit
        }
        names = {field.name for field in dataclasses.fields(PlanOptions)} - {"backends"}
        options = PlanOptions(backends=explicit, **{name: getattr(asked, name) for name in names})
        return (resolve, (self.config, options))


def _size(value: int | None) -> str:
    return "?" if value is None else str(value)


def describe_request(request: Request) -> str:
    """The request in one line: shapes in the contract's symbols, then what else matters to a
    backend.
    """
    g = request.geometry
    shape = (
        f"B={_size(request.batch)} S={_size(request.seq_len)} Hq={request.n_heads}"
        f" G={request.n_kv_heads} Dk={request.head_dim} Dv={request.v_head_dim}"
        f" l={g.compress_block_size} d={g.compress_stride} l'={g.select_block_size}"
        f" n={g.num_selected_blocks} w={g.window_size}"
    )
    device = request.device + (
        f" sm_{request.capability[0]}{request.capability[1]}" if request.capability else ""
    )
    said = {
        "gradients": request.needs_grad,
        "deterministic": request.deterministic,
        "packed": request.varlen,
    }
    flags = [
        word
        for word, yes in (
            said | {f"pages of {request.page_size} tokens": request.page_size}
        ).items()
        if yes
    ]
    return ", ".join([shape, f"{request.dtype} on {device}", request.phase, *flags])


def resolve(
    config: NSAConfig,
    options: PlanOptions | None = None,
    *,
    registry: Registry | None = None,
    **fields: Any,
) -> Plan:
    """Decide which backend runs each slot.

    Args:
        config: the layer's configuration.
        options: what else is asked (:class:`nsa_core.dispatch.options.PlanOptions`).
        registry: where backends come from; None: the installed plugins.
        **fields: fields of PlanOptions by name, in place of those of ``options``: device, dtype,
            backends, needs_grad, deterministic, varlen, phase, batch, seq_len, page_size.

    Raises:
        InvalidInput: an argument is wrong for every backend; an unknown backend or slot, with a
            suggestion.
        BackendUnavailable: a backend asked for by name is not ready or its kernels do not import;
            or there is none.
        Unsupported: a backend asked for by name, or every backend, refuses; the message lists every
            reason.

    Example:
        >>> plan = resolve(NSAConfig(768, 12, 2), device="cpu", dtype="float32", needs_grad=True)
    """
    options = dataclasses.replace(options or PlanOptions(), **fields)
    registry = default_registry() if registry is None else registry
    return decide(find_candidates(config, options, registry=registry))


def decide(answers: Candidates) -> Plan:
    """The plan that ``answers`` allow; raises as :func:`resolve`."""
    outcomes = {slot: _decide_slot(answers, slot) for slot in SLOTS}
    refused = {slot: error for slot, (_, _, error) in outcomes.items() if error is not None}
    if refused:
        text = _report(answers, {slot: outcomes[slot][1] for slot in refused})
        if BackendUnavailable not in refused.values():
            raise Unsupported(text)
        unavailable_error = BackendUnavailable(text)
        unavailable_error.nothing_usable = not answers.registry.ready()
        raise unavailable_error
    choices, kernels, slots = {}, {}, {}
    for slot, (chosen, candidates, _) in outcomes.items():
        assert chosen is not None  # no error: somebody was chosen
        candidate, kernel = chosen
        explicit = answers.wanted[slot] is not None
        first = not explicit and candidates[0].backend == candidate.backend
        said = answers.tuned.get(slot, "") if first else ""
        choices[slot] = Choice(
            slot, candidate.backend, candidate.version, explicit, candidates, said
        )
        spec = answers.registry.get(candidate.backend).spec
        assert spec is not None  # an accepted candidate is ready
        kernels[slot], slots[slot] = kernel, spec.slots[slot]
    _say_once(answers, choices)
    fused = MappingProxyType(_fused(answers, choices))
    frozen = (MappingProxyType(choices), MappingProxyType(slots))
    return Plan(
        answers.config, answers.requests, frozen[0], _slots=frozen[1], fused=fused, **kernels
    )


def _kernel(answers: Candidates, slot: str, backend: str) -> Kernel | DecodeKernel:
    """What runs ``slot`` on ``backend``; whatever importing its functions raises passes through."""
    spec, request = answers.registry.get(backend).spec, answers.requests[slot]
    assert spec is not None  # an accepted candidate is ready
    chosen = spec.slots[slot]
    if request.phase == "decode" and chosen.decode is not None:
        return decode_kernel(backend, slot, chosen.decode)
    scale, geometry = answers.config.softmax_scale, tuple(request.geometry.as_ints())
    return Kernel(
        backend, slot, slot_op(backend, slot, chosen).op, scale, geometry, request.deterministic
    )


def _fused(answers: Candidates, choices: Mapping[str, Choice]) -> dict[str, DecodeKernel]:
    """The fused decode forms, where one backend runs every slot."""
    names = {choice.backend for choice in choices.values()}
    spec = answers.registry.get(names.pop()).spec if len(names) == 1 else None
    if spec is None or answers.requests["cmp"].phase != "decode":
        return {}
    return {name: decode_kernel(spec.name, name, path) for name, path in spec.fused.items()}


_Outcome = tuple[tuple[Candidate, Any] | None, tuple[Candidate, ...], type[NSAError] | None]


def _decide_slot(answers: Candidates, slot: str) -> _Outcome:
    """(chosen candidate and its kernel, candidates with what importing added, or the error's
    type).
    """
    name, candidates = answers.wanted[slot], list(answers.by_slot[slot])
    error: type[NSAError] = Unsupported
    if (
        not answers.registry.ready()
        if name is None
        else answers.registry.get(name).status != "ready"
    ):
        error = BackendUnavailable
    for index, candidate in enumerate(candidates):
        if name not in (None, candidate.backend) or not candidate.accepted:
            continue
        try:
            return (candidate, _kernel(answers, slot, candidate.backend)), tuple(candidates), None
        except Exception as failure:  # noqa: BLE001  plugins are other people's code
            text = f"its kernel does not load: {describe_error(failure)}"
            reason = Reason("kernel_import_failed", text, "reinstall the plugin")
            candidates[index] = dataclasses.replace(candidate, reasons=(reason,))
            error = BackendUnavailable if name else error
    return None, tuple(candidates), error


def _report(answers: Candidates, refused: Mapping[str, tuple[Candidate, ...]]) -> str:
    """One sentence, the request, and for every slot that nobody runs a line per backend."""
    named = {slot: one_line(name) for slot in refused if (name := answers.wanted[slot]) is not None}
    sentences = [
        f"{name!r} cannot run {', '.join(s for s in named if named[s] == name)}"
        for name in {*named.values()}
    ]
    others = [slot for slot in refused if slot not in named]
    if others:
        sentences.append(
            f"no backend takes {', '.join(others)}" if answers.registry.ready() else _NO_BACKEND
        )
    lines = [
        "; ".join(sorted(sentences)),
        f"  request: {describe_request(answers.requests['cmp'])}",
    ]
    blocks: dict[tuple[str, ...], list[str]] = {}  # slots that got the same answers share one block
    for slot, candidates in refused.items():
        said = [f"    {candidate}" for candidate in candidates] or ["    no backend is installed"]
        blocks.setdefault((named.get(slot, ""), *said), []).append(slot)
    for (name, *said), slots in blocks.items():
        lines += [f"  {', '.join(slots)}" + (f" (asked for {name!r}):" if name else ":"), *said]
    return "\n".join(lines)


def _say_once(answers: Candidates, choices: Mapping[str, Choice]) -> None:
    chosen = {slot: f"{c.backend} {c.version}" for slot, c in choices.items() if not c.explicit}
    request = answers.requests["cmp"]
    said = (
        request.device,
        request.dtype,
        *(f"{slot}: {one_line(name)}" for slot, name in chosen.items()),
    )
    with _said_lock:
        if not chosen or said in _said:
            return
        _said.add(said)
    _log.info("auto chose %s (%s)", ", ".join(said[2:]), describe_request(request))
