"""Format numbers as text, and define the plain form of a table."""

from __future__ import annotations

import math
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
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    rounded = float(f"{value:.2e}")
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def percent(value: float | None) -> str:
    """Format a fraction in percent with one decimal, without the sign; "-" for None."""
    return "-" if value is None else f"{value:.1%}".removesuffix("%")


def size(count: int | None) -> str:
    """Format a number of bytes in MiB; "-" for None."""
    return "-" if count is None else number(count / 2**20)
