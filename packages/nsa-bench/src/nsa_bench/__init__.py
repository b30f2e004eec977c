"""Timing NSA backends against dense attention: correctness first, all candidates interleaved in one
run.
"""
