"""Models built on NSAttention."""
