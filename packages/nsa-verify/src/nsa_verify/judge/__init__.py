"""Verdicts on tensors, selections, slots and layer gradients."""
