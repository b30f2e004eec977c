"""What is judged: cases, combinations of backends, runs of slots, and findings."""
