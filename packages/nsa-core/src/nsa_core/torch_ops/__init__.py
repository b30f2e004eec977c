"""Slots as PyTorch operators: schema, shape inference, autograd, tensor checks, decode forms."""
