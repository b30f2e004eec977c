"""Numbers as text, and the plain form of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from nsa_bench.timing import Performance

Rows: TypeAlias = tuple[str, list[str], list[list[str]]]  # title, columns, cells


def milliseconds(performance: Performance | None) -> str:
    """ "1.23" for a median of 1.23 ms; "-" where there is none."""
    return "-" if performance is None else number(performance.median_ms)


def number(value: float | None) -> str:
    """Three significant digits, never in exponent form; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(count: int | None) -> str:
    """Bytes in MiB."""
    return "-" if count is None else number(count / 2**20)
