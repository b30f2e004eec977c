"""Histories of a cache: random operations on an NSACache, and a model of their result."""
