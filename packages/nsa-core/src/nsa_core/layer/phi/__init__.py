"""phi, the compression of blocks of keys and values (arXiv 2502.11089, Eq. 7)."""
