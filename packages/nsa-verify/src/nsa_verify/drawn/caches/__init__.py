"""Histories of a cache: drawn, replayed on a real layer, and compared with a model."""
