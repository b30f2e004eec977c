"""Drawn cases, decode steps and cache histories: lines of text, designs, judges and shrinking."""
