"""Options that the conformance suite adds to pytest; pytest loads them wherever nsa-verify is
installed. No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much of the suite runs, and where."""
    group = parser.getgroup("nsa", "Native Sparse Attention: backend conformance")
    group.addoption(
        "--nsa-preset",
        choices=("quick", "full"),
        default="quick",
        help="cases of the verify checks",
    )
    group.addoption(
        "--nsa-device", default="auto", help="cpu, cuda, or auto: cuda where there is one"
    )
