"""A second truth, computed with dense masks; it shares no code with the oracle."""
