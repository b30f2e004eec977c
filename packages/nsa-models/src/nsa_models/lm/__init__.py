"""A small language model on NSA or dense attention: sizes, data, training and generation."""
