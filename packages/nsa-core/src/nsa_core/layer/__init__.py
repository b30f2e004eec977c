"""The NSA layer: projection, compression, three branches, gates (arXiv 2502.11089, Figure 2)."""
