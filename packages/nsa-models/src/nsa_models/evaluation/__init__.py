"""Score checkpoints on tasks of the lm-evaluation-harness."""
