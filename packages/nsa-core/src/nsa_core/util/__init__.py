"""Helpers that are independent of attention: text, files, optional libraries, signals."""
