"""A second implementation of the truth, with dense masks; it shares no code with the oracle."""
