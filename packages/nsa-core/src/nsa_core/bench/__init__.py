"""Timing combinations of backends against dense attention: correctness first, everything in one interleaved run."""
