"""Benchmarks of NSA backends against dense attention; only kernels that pass a check are timed."""
