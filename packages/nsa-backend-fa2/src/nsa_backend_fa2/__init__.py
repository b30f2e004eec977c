"""Native Sparse Attention branches on FlashAttention-2: no kernels yet; the plugin says so."""
