"""Models built on :class:`nsa_core.NSAttention`."""
