"""Checks around the calls of third-party code, and the state of the GPU after them."""
