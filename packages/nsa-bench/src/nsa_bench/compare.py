"""Compare two result files: which times changed by more than the noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nsa_bench.result import Measurement, Result
from nsa_bench.timing import NOT_MEASURED, Performance
from nsa_core.errors import InvalidInput
from nsa_core.limits import shown

Key = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Change:
    """One time in two result files."""

    # kind, subject, shape, dtype, inputs, phase, batch, length, part ("total", "eager" or a slot)
    key: Key
    old_ms: float | None
    new_ms: float | None
    ratio: float | None  # new over old; None if one of them is missing or not positive
    verdict: str  # slower, faster, same, lost, gained, missing, new
    note: str = ""  # set if the two were timed with different methods


def compare(old: Result, new: Result, *, fail_over: float, force: bool = False) -> list[Change]:
    """Compare each time in ``old`` with the same time in ``new``.

    If only one of the two was timed as a CUDA graph, the
    eager times are compared where both have one, because a new capture rule makes no kernel faster.
    A call that can no longer be captured is compared with its old graph time.

    Args:
        old: The reference result.
        new: The result to judge.
        fail_over: Tolerated relative growth of the median; 0.05 is 5 %.
        force: Compare results of different machines or settings too.

    Returns:
        One change per time in either file. Its verdict is one of: "slower", if the median grew by
        more than ``fail_over`` and the quartiles do not overlap; "faster", likewise; "lost", if a
        time became null (failed gate, out of memory); "gained", the reverse; "missing", if ``new``
        did not measure a time of ``old``; "new", if only ``new`` measured it; otherwise "same".

    Raises:
        InvalidInput: Devices, threads, blocks or the source of real inputs differ (unless
            ``force``), or the results have no measurement in common.
    """
    both_real = all("real" in result.settings.get("inputs", []) for result in (old, new))
    differences = [
        f"{name} {shown(_setting(old, name))} and {shown(_setting(new, name))}"
        for name in (
            "device",
            "threads",
            "blocks",
            *(("text_name", "text_bytes", "checkpoints") * both_real),
        )
        if _setting(old, name) != _setting(new, name)
    ]
    if differences and not force:
        raise InvalidInput(
            f"the results are not comparable: {'; '.join(differences)};"
            " give --force to compare them anyway"
        )
    before, after = _performances(old), _performances(new)
    if not before.keys() & after.keys():
        raise InvalidInput("the results have no measurement in common")
    changes = [_change(key, before[key], after[key], fail_over) for key in before if key in after]
    changes += [
        Change(key, ms, None, None, "missing", why_missing(new, key))
        for key, ms in _only_in(before, after)
    ]
    return changes + [Change(key, None, ms, None, "new") for key, ms in _only_in(after, before)]


def _only_in(
    times: dict[Key, Performance | None], others: dict[Key, Performance | None]
) -> Iterator[tuple[Key, float]]:
    """Yield the median of each time that only the first of two results has.

    A time that neither has is not missing. A total that is no CUDA graph is eager.
    """
    for key, performance in times.items():
        is_compared = key[-1] == "eager" and (*key[:-1], "total") in others
        if key not in others and performance is not None and not is_compared:
            yield key, performance.median_ms


def regressed(changes: list[Change], allow_missing: bool = False) -> list[Change]:
    """Return the changes that make a comparison fail: slower, lost and missing times.

    Args:
        changes: The changes.
        allow_missing: Tolerate times that the new file did not measure.
    """
    failing = ("slower", "lost") if allow_missing else ("slower", "lost", "missing")
    return [change for change in changes if change.verdict in failing]


def why_missing(result: Result, key: Key) -> str:
    """Return the reason that ``result`` states for a time that it did not measure, or ""."""
    for m in result.measurements:
        if _key(m, key[-1]) == key:
            part = m.parts.get(key[-1])
            return m.reason or (part.reason if part else "")
    return ""


def _setting(result: Result, name: str) -> object:
    return result.environment.get(name) if name == "device" else result.settings.get(name)


def _performances(result: Result) -> dict[Key, Performance | None]:
    performances: dict[Key, Performance | None] = {}
    for m in result.measurements:
        if not m.reason.startswith(NOT_MEASURED):
            performances[_key(m, "total")] = m.performance
            if m.performance is not None and m.performance.eager is not None:
                performances[_key(m, "eager")] = m.performance.eager
            measured = {
                n: part for n, part in m.parts.items() if not part.reason.startswith(NOT_MEASURED)
            }
            performances |= {_key(m, name): part.performance for name, part in measured.items()}
    return performances


def _key(m: Measurement, part: str) -> Key:
    return (m.kind, m.subject, *map(str, (*m.series, m.length)), part)


def _change(key: Key, old: Performance | None, new: Performance | None, fail_over: float) -> Change:
    before = old.median_ms if old else None
    after = new.median_ms if new else None
    if old is None or new is None:
        return Change(
            key, before, after, None, "same" if old is new else "lost" if old else "gained"
        )
    old, new, note = _comparable(old, new)
    if min(old.median_ms, new.median_ms) <= 0:  # of a part, a difference of two times
        return Change(key, old.median_ms, new.median_ms, None, "same", "too short to compare")
    ratio = new.median_ms / old.median_ms
    verdict = "same"
    if ratio > 1 + fail_over and new.q1_ms > old.q3_ms:
        verdict = "slower"
    elif ratio < 1 / (1 + fail_over) and new.q3_ms < old.q1_ms:
        verdict = "faster"
    return Change(key, old.median_ms, new.median_ms, ratio, verdict, note)


def _comparable(old: Performance, new: Performance) -> tuple[Performance, Performance, str]:
    """Return the pair to compare, and a note if the methods differ or eager times replace it."""
    if old.method == new.method:
        return old, new, ""
    if new.not_captured:
        return old, new, f"no longer captured: {new.not_captured}"
    if old.method == "events" and new.eager is not None:
        return old, new.eager, "eager calls: captured only in the new file"
    if new.method == "events" and old.eager is not None:
        return old.eager, new, "eager calls: captured only in the old file"
    is_graph = "graph" in (old.method, new.method)
    return old, new, f"{old.method}, then {new.method}" if is_graph else ""
