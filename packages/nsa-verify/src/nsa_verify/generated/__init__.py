"""Generated cases: configurations drawn from a seeded covering design, and judged by the oracle."""
