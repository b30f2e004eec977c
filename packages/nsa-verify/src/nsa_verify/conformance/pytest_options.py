"""Options that the conformance suite adds to pytest.

pytest imports this module wherever nsa-verify is installed, so it must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the preset and the device of the conformance suite."""
    group = parser.getgroup("nsa", "Native Sparse Attention: backend conformance")
    group.addoption(
        "--nsa-preset",
        choices=("quick", "full"),
        default="quick",
        help="cases of the verify checks: quick or full",
    )
    group.addoption(
        "--nsa-device", default="auto", help="cpu, cuda, or auto (cuda if available, else cpu)"
    )
