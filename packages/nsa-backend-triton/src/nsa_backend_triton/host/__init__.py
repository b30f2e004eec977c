"""Host code around kernels: sequences, tile tables, launch cache, tensor descriptors."""
