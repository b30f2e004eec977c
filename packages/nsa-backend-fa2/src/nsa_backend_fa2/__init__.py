"""A backend of nsa_core that runs cmp, sel and win on FlashAttention-2."""
