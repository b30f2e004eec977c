"""FlashAttention-2 as a backend of nsa_core; plugin.py says what it offers."""
