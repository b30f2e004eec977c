"""The conformance suite for backend authors. A test file of three lines runs it::

    from nsa_verify.conformance import BackendConformance

    class TestMine(BackendConformance):
        backend = "mine"

The suite requires pytest: ``pip install "nsa-verify[test]"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa_verify.conformance.suite import BackendConformance

__all__ = ["BackendConformance"]


def __getattr__(name: str) -> Any:
    # Lazy, because pytest imports this package for its options at every start, and importing torch
    # takes seconds.
    if name == "BackendConformance":
        from nsa_verify.conformance.suite import BackendConformance

        return BackendConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
