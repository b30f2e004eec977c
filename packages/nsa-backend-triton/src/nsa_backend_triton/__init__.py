"""Native Sparse Attention kernels in Triton: no kernels yet; the plugin says so."""
