"""Format numbers as text, and define the plain form of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from nsa_bench.timing import Performance

Rows: TypeAlias = tuple[str, list[str], list[list[str]]]  # title, columns, cells


def milliseconds(performance: Performance | None) -> str:
    """Format a median: "1.23" for 1.23 ms, "-" for None."""
    return "-" if performance is None else number(performance.median_ms)


def number(value: float | None) -> str:
    """Format with three significant digits, never with an exponent; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(count: int | None) -> str:
    """Format a number of bytes in MiB; "-" for None."""
    return "-" if count is None else number(count / 2**20)
