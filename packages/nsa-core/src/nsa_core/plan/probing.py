"""Run a backend's probe and rank for a request, with a time limit.

Plugins are third-party code: any failure inside one becomes a reason against it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from typing import Any

from nsa_core.contract import Rank, Reason, Request
from nsa_core.plan.loading import BackendEntry, is_reason, report_hint
from nsa_core.torch_ops.call_wrapper import call_function, import_function
from nsa_core.torch_ops.schema import DIFFERENTIABLE
from nsa_core.util.global_state import SETTINGS, is_new, loading
from nsa_core.util.interruption import is_ctrl_c
from nsa_core.util.plugin_output import stdout_to_stderr
from nsa_core.util.text import describe_error, one_line

PROBE_LIMIT_S = 5.0


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


def reasons_against(
    entry: BackendEntry, request: Request, probe_timeout: Reason | None = None
) -> tuple[Reason, ...]:
    """Return every reason against running ``request`` on ``entry``.

    Args:
        entry: The backend.
        request: The request.
        probe_timeout: The reason from an earlier probe of this backend that timed out. The probe
            is not called again, and this reason takes its place.
    """
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
    if probe_timeout:
        return (*reasons, probe_timeout)
    return (*reasons, *_probe(entry, entry.spec.probe, request))


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
    hint = report_hint(entry.distribution)
    try:
        rank = _call_limited(entry, entry.spec.rank, request)
    except _TooSlowError:
        text = f"its rank function did not return within {PROBE_LIMIT_S:g} s"
        return priority, (Reason("rank_too_slow", text, hint),)
    except _RaisedError as error:
        text = f"its rank raised {describe_error(error.error)}"
        return priority, (Reason("rank_raised", text, hint),)
    value, why = rank if type(rank) is Rank else (rank, "")
    if type(value) is not int or type(why) is not str:
        text = f"its rank returned {type(rank).__name__}, not an integer or a Rank"
        return priority, (Reason("rank_nonsense", text, hint),)
    return Rank(value, why), reasons


def details(entry: BackendEntry) -> list[str]:
    """Return the lines of the backend's detail function; a failure of that function is a line."""
    if entry.spec is None or entry.spec.detail is None:
        return []
    try:
        return [one_line(text) for text in _call_limited(entry, entry.spec.detail)]
    except _TooSlowError:
        return [f"its detail function did not return within {PROBE_LIMIT_S:g} s"]
    except _RaisedError as error:
        return [f"its detail function raised {describe_error(error.error)}"]


class _TooSlowError(Exception):
    """The function of a plugin did not return in time."""


class _RaisedError(Exception):
    """The function of a plugin raised ``error``, which may be any BaseException."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(type(error)))
        self.error = error


def _probe(entry: BackendEntry, path: str, request: Request) -> tuple[Reason, ...]:
    """Return the reasons from the probe that ``path`` names; a failing probe is a reason itself."""
    hint = report_hint(entry.distribution)
    try:
        result = _call_limited(entry, path, request)
    except _TooSlowError:
        text = f"its probe did not answer within {PROBE_LIMIT_S:g} s"
        return (Reason("probe_too_slow", text, hint),)
    except _RaisedError as error:
        text = f"its probe raised {describe_error(error.error)}"
        return (Reason("probe_raised", text, hint),)
    if not isinstance(result, (list, tuple)) or not all(map(is_reason, result)):
        text = f"its probe returned {type(result).__name__}, not a list of Reasons"
        return (Reason("probe_nonsense", text, hint),)
    return tuple(result)


def _state_restored(entry: BackendEntry, path: str) -> contextlib.AbstractContextManager[None]:
    """Return the context of a call of a backend's function, which may import modules."""
    if is_new(path):
        return loading(entry.name)
    return contextlib.nullcontext() if entry.first_party else loading(entry.name, SETTINGS)


def _call_limited(entry: BackendEntry, path: str, *arguments: Any) -> Any:
    """Import the function that ``path`` names, and return its result for ``arguments``.

    It runs in a daemon thread, which is abandoned after PROBE_LIMIT_S seconds. What a third-party
    backend prints goes to standard error.

    Raises:
        _TooSlowError: The function did not return in time.
        _RaisedError: The import or the function raised.
    """
    outcomes: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            where = (entry.name, path, "plugin")
            outcomes.put((call_function(where, function, arguments), None))
        except BaseException as error:  # noqa: BLE001  raised again in the calling thread
            outcomes.put((None, error))

    quiet = contextlib.nullcontext() if entry.first_party else stdout_to_stderr()
    with quiet, _state_restored(entry, path):
        try:
            function = import_function(entry.name, path)
        except BaseException as failure:
            if is_ctrl_c(failure):
                raise
            raise _RaisedError(failure) from failure
        threading.Thread(target=call, name="nsa-probe", daemon=True).start()
        try:
            result, error = outcomes.get(timeout=PROBE_LIMIT_S)
        except queue.Empty:
            raise _TooSlowError from None
    if error is not None:
        raise _RaisedError(error) from error
    return result
