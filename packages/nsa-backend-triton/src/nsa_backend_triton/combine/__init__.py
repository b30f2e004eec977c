"""combine: the gated sum of the three branches."""
