"""Decoding over pages: append tokens, compress their blocks, attend."""
