"""Native Sparse Attention in plain PyTorch: all slots, both directions, on CPU and CUDA GPUs."""
