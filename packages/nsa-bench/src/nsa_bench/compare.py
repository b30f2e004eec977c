"""Two result files side by side: what became slower beyond the noise."""

from __future__ import annotations

import dataclasses

from nsa_bench.result import Measurement, Result
from nsa_bench.timing import NOT_MEASURED, Performance
from nsa_core.errors import InvalidInput

Key = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Change:
    """One figure in both files. ``ratio`` is new over old, None where one is missing."""

    # kind, subject, shape, dtype, inputs, phase, batch, length, part ("total", "eager" or a branch)
    key: Key
    old_ms: float | None
    new_ms: float | None
    ratio: float | None
    verdict: str  # slower, faster, same, lost, gained, missing
    note: str = ""  # where the methods differ


def compare(old: Result, new: Result, *, fail_over: float, force: bool = False) -> list[Change]:
    """Every figure of ``old`` beside ``new``'s, the figures that only ``new`` has left out.

    Where one is of a CUDA graph and the other is not, eager times are compared where both have
    them: another rule for what is captured makes nothing faster. What can no longer be captured has
    lost its graph's time.

    slower: the median grew by more than ``fail_over`` (0.05 is 5 %) and the quartiles do not
    overlap; faster likewise. lost: a figure became null (its gate failed, out of memory). missing:
    ``new`` did not measure it.

    Raises:
        InvalidInput: other devices, threads, blocks, or what real inputs are made of (unless
            ``force``), or nothing in common.
    """
    both_real = all("real" in result.settings.get("inputs", []) for result in (old, new))
    differ = [
        f"{name} {_said(old, name)!r} and {_said(new, name)!r}"
        for name in (
            "device",
            "threads",
            "blocks",
            *(("text_name", "text_bytes", "checkpoints") * both_real),
        )
        if _said(old, name) != _said(new, name)
    ]
    if differ and not force:
        raise InvalidInput(
            f"the results are not comparable: {'; '.join(differ)}; give --force to compare all the"
            " same"
        )
    before, after = _figures(old), _figures(new)
    if not before.keys() & after.keys():
        raise InvalidInput("the results have no measurement in common")
    return [_change(key, before[key], after.get(key, "missing"), fail_over) for key in before]


def regressed(changes: list[Change]) -> list[Change]:
    """The changes that make a comparison fail."""
    return [change for change in changes if change.verdict in ("slower", "lost")]


def _said(result: Result, name: str) -> object:
    return result.environment.get(name) if name == "device" else result.settings.get(name)


def _figures(result: Result) -> dict[Key, Performance | None]:
    found: dict[Key, Performance | None] = {}
    for m in result.measurements:
        if not m.reason.startswith(NOT_MEASURED):
            found[_key(m, "total")] = m.performance
            if m.performance is not None and m.performance.eager is not None:
                found[_key(m, "eager")] = m.performance.eager
            measured = {
                n: part for n, part in m.parts.items() if not part.reason.startswith(NOT_MEASURED)
            }
            found |= {_key(m, name): part.performance for name, part in measured.items()}
    return found


def _key(m: Measurement, part: str) -> Key:
    return (
        m.kind,
        m.subject,
        m.shape,
        m.dtype,
        m.inputs,
        m.phase,
        str(m.batch),
        str(m.length),
        part,
    )


def _change(
    key: Key, old: Performance | None, new: Performance | str | None, fail_over: float
) -> Change:
    before = old.median_ms if old else None
    if isinstance(new, str):
        return Change(key, before, None, None, new)
    after = new.median_ms if new else None
    if old is None or new is None:
        return Change(
            key, before, after, None, "same" if old is new else "lost" if old else "gained"
        )
    old, new, note = _alike(old, new)
    ratio = new.median_ms / old.median_ms
    verdict = "same"
    if ratio > 1 + fail_over and new.q1_ms > old.q3_ms:
        verdict = "slower"
    elif ratio < 1 / (1 + fail_over) and new.q3_ms < old.q1_ms:
        verdict = "faster"
    return Change(key, old.median_ms, new.median_ms, ratio, verdict, note)


def _alike(old: Performance, new: Performance) -> tuple[Performance, Performance, str]:
    """What to compare of two figures, and a note where that is not as measured or not by one
    method.
    """
    if old.method == new.method or new.not_captured:
        return (
            old,
            new,
            f"no longer captured: {new.not_captured}" if old.method != new.method else "",
        )
    if old.method == "events" and new.eager is not None:
        return old, new.eager, "eager calls: only the new file's was captured"
    if new.method == "events" and old.eager is not None:
        return old.eager, new, "eager calls: only the old file's was captured"
    return (
        old,
        new,
        f"{old.method}, then {new.method}" if "graph" in (old.method, new.method) else "",
    )
