"""Published ways to choose blocks for :func:`nsa_core.block_attention`, as short recipes."""
