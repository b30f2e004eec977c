"""The command line of Native Sparse Attention. Importing this package does not import torch."""
