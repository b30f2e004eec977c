"""Decoding: a cache of what a layer has seen, and the layer's step over it."""

from nsa_core.cache.cache import NSACache, Snapshot

__all__ = ["NSACache", "Snapshot"]
