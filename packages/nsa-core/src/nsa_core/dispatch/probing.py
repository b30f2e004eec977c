"""One backend's answer to one request: its probe and its rank, called with a time limit.

Plugins are other people's code: whatever goes wrong inside one is a reason against it.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from typing import Any

from nsa_core.contract import Reason, Request, import_named
from nsa_core.dispatch.loading import BackendEntry, is_reason, report_hint
from nsa_core.torch_ops.slot_op import DIFFERENTIABLE
from nsa_core.util.text import describe_error, one_line

PROBE_LIMIT_S = 5.0


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


def ask(entry: BackendEntry, request: Request) -> Candidate:
    """What ``entry`` says to one request, which may describe a device that is not here."""
    return Candidate(entry.name, entry.version, entry.status, reasons_against(entry, request))


def reasons_against(
    entry: BackendEntry, request: Request, given_up: Reason | None = None
) -> tuple[Reason, ...]:
    """Every reason against ``entry`` running ``request``.

    ``given_up`` is the reason why its probe was given up earlier; the probe is then not asked.
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


def rank_of(
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
