"""Helpers with no knowledge of attention: text, files, optional libraries, signals."""
