"""Native Sparse Attention kernels in Triton, forward and backward."""
