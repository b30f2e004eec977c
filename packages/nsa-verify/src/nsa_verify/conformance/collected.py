"""What `nsa conformance NAME` runs: the suite of the backend that the command names."""

from __future__ import annotations

from nsa_verify.conformance import BackendConformance


class TestBackend(BackendConformance):
    """Every test of the kit, for ``config.option.nsa_backend``."""
