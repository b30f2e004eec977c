"""Decoding: a cache of keys and values, and the steps of a layer over it."""

from nsa_core.cache.cache import NSACache, Snapshot

__all__ = ["NSACache", "Snapshot"]
