"""Isolation of third-party code: checks around its calls, and child processes that run it."""
