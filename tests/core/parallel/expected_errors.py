"""The errors of calls that ranks refuse, or on which they disagree."""

from __future__ import annotations

CALLS = ("sequence", "heads", "blocks")
# (what is called, the difference of rank 1) -> the error on both ranks
DISAGREEMENTS: dict[tuple[str, str], str] = {
    ("sequence", "documents"): "cu_seqlens on rank 1 differs from that on rank 0 (rank {rank} has"
    " cu_seqlens = [0, 5, 5",
    ("sequence", "max_seqlen"): "max_seqlen on rank 1 differs from that on rank 0",
    ("sequence", "config"): "the config on rank 1 differs from that on rank 0",
    ("sequence", "rows"): "the shape of x on rank 1 differs from that on rank 0",
    ("sequence", "dtype"): "the dtype of x on rank 1 differs from that on rank 0",
    ("sequence", "the dtype of x"): "the dtype of x on rank 1 differs from that on rank 0",
    ("sequence", "layout"): "the layout on rank 1 differs from that on rank 0",
    ("sequence", "mode"): "the mode on rank 1 differs from that on rank 0",
    ("sequence", "reduce_dtype"): "reduce_dtype on rank 1 differs from that on rank 0",
    ("sequence", "plan"): "the plan on rank 1 differs from that on rank 0 (rank {rank} has the plan"
    " = {{'cmp': 'sdpa ",
    ("sequence", "recompute"): "recompute on rank 1 differs from that on rank 0",
    ("sequence", "grad mode"): "grad mode on rank 1 differs from that on rank 0",
    ("sequence", "requires_grad"): "requires_grad on rank 1 differs from that on rank 0",
    ("heads", "documents"): "cu_seqlens on rank 1 differs from that on rank 0",
    ("heads", "width"): "the shape of x on rank 1 differs from that on rank 0",
    ("heads", "config"): "the config on rank 1 differs from that on rank 0",
    ("blocks", "documents"): "cu_seqlens on rank 1 differs from that on rank 0",
    ("blocks", "layout"): "the layout on rank 1 differs from that on rank 0 (rank {rank} has the"
    " layout = '",
}
# (what is called, the fault of the call on rank 1) -> the error on rank 1
FAULTS: dict[tuple[str, str], str] = {
    ("sequence", "a broken plan"): "KeyError: 'cmp'",  # not an NSAError
    ("sequence", "int64 documents"): "InvalidInput: cu_seqlens must be an int32 tensor",
    ("heads", "no plan"): "InvalidInput: plan must be",
    (
        "blocks",
        "a plan for whole sequences",
    ): "InvalidInput: plan was resolved without partial=True",
}
REFUSALS: dict[str, str] = {
    "new_cache": "Unsupported: new_cache is not context parallel",
    "a cache": "Unsupported: a call with a cache is not context parallel",
    "new": "Unsupported: a call with a cache is not context parallel",
    "a transform": "Unsupported: a call that is divided over ranks is not supported under torch.f",
    "a transform of divided heads": "Unsupported: a call that is divided over ranks is not",
    "an odd number of rows": "InvalidInput: x must have an even number of rows for layout"
    " 'head_tail', got 7",
    "a plan for whole sequences": "InvalidInput: plan was resolved without partial=True",
    "a plan of other sizes": "InvalidInput: plan is for window_size=10, but the call has",
    "documents of other rows": "InvalidInput: cu_seqlens must end at the 16 tokens given, got 8",
    "a second style": "InvalidInput: ContextParallel: the layer is divided already",
    "another module": "InvalidInput: ContextParallel divides NSAttention layers, got Linear",
    "too many ranks for heads": "InvalidInput: mode 'heads' needs a mesh whose size divides"
    " n_kv_heads: 2 ranks do not divide 3 key/value heads",
    "another module for heads": "InvalidInput: HeadParallel divides NSAttention layers, got Linear",
    "too many ranks for groups": "InvalidInput: HeadParallel needs a mesh whose size divides"
    " n_kv_heads: 2 ranks do not divide 3 key/value heads",
    "a sharded layer for heads": "InvalidInput: HeadParallel needs plain layers qkv, out and gate,"
    " got FSDPLinear, FSDPLinear, FSDPLinearGate: apply the style before wrapping",
    "a sharded phi for heads": "InvalidInput: HeadParallel needs parameters that are not sharded,"
    " got phi_k.",
    "a sharded norm for heads": "InvalidInput: HeadParallel needs parameters that are not sharded,"
    " got q_norm.weight (DTensor): apply the style before fully_shard",
    "a cache of divided heads": "Unsupported: new_cache is not head parallel",
    "adapters on divided heads": "InvalidInput: whole_parameters needs plain layers qkv, out and"
    " gate, got the parameters qkv.base_layer.weight: merge adapters into the layers first",
    "a mesh of two dimensions": "InvalidInput: ContextParallel needs a mesh of one dimension, got 2"
    " dimensions (1, 2): pass one of them, for example mesh['cp']",
}
