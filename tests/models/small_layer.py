"""The layer of the small models of these tests."""

from nsa_core import NSAConfig

LAYER = NSAConfig(
    dim=24,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    v_head_dim=6,
    compress_block_size=4,
    compress_stride=2,
    select_block_size=4,
    num_selected_blocks=4,
    window_size=7,
)
