"""Subjects of the judge: cases, decode steps, combinations, runs of slots, and findings."""
