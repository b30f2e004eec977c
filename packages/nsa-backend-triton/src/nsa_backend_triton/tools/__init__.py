"""Offline compilation and workspace sizes, from tensors without data."""
