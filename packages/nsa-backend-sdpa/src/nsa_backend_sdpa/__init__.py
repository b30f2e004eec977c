"""Native Sparse Attention in plain PyTorch: all slots, forward and backward, on CPU and any GPU."""
