"""The kit for authors of backends: a conformance suite that a test file of three lines runs.

    from nsa_verify.conformance import BackendConformance

    class TestMine(BackendConformance):
        backend = "mine"

It needs pytest: ``pip install "nsa-verify[test]"``. From the command line the same suite is ``nsa
conformance mine``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa_verify.conformance.suite import BackendConformance

__all__ = ["BackendConformance"]


def __getattr__(name: str) -> Any:
    # Late, because pytest imports this package for its options at every start, and torch takes
    # seconds.
    if name == "BackendConformance":
        from nsa_verify.conformance.suite import BackendConformance

        return BackendConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
