"""select: scores of compressed keys, summed over a group, ranked into blocks."""
