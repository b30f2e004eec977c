"""The command line of Native Sparse Attention. Importing it imports no torch."""
