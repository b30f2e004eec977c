"""The test module that `nsa conformance NAME` runs."""

from __future__ import annotations

from nsa_verify.conformance import BackendConformance


class TestBackend(BackendConformance):
    """The conformance suite for the backend ``config.option.nsa_backend``."""
