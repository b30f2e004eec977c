"""One sequence, or the heads of a layer, on several GPUs, with PyTorch's own torch.distributed.

    Shards           the rows of a rank; pad_to and choose_layout prepare them
    ContextParallel  a style for parallelize_module: divides the sequence of NSAttention layers
    HeadParallel     a style for parallelize_module: divides the heads of NSAttention layers

divided_block_attention is block_attention over a sequence that is divided over ranks.

docs/how-to/fsdp.md shows how to train with them.
"""

from nsa_core.parallel.block_rows import divided_block_attention
from nsa_core.parallel.context import ContextParallel
from nsa_core.parallel.head_parallel import HeadParallel, clip_gradients, whole_parameters
from nsa_core.parallel.shards import Shards, choose_layout, pad_to

__all__ = [
    "ContextParallel",
    "HeadParallel",
    "Shards",
    "choose_layout",
    "clip_gradients",
    "divided_block_attention",
    "pad_to",
    "whole_parameters",
]
