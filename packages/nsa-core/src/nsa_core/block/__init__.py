"""block_attention: one branch of attention over selected blocks, without an NSA layer."""
