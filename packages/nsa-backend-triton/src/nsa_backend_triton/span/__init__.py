"""cmp and win: attention over a contiguous span of keys per query."""
