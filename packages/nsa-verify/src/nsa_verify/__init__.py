"""Verification of NSA kernels: float64 oracle, verdict, checks, and the conformance kit for backend
authors.
"""
