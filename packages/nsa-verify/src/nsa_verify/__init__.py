"""Verify NSA kernels: float64 oracle, verdicts, checks, and a conformance suite for backends."""
