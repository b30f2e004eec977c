"""A small language model on NSA or dense attention: its sizes, data, training and generation."""
