"""The NSA layer: projections, compression, gates and branches (arXiv 2502.11089, Figure 2)."""
