"""Slots as PyTorch operators: schema, shape inference, autograd, checks, decode forms."""
