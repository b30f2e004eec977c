"""Kernels of several slots as one: the backward of the whole core."""
