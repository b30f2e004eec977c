"""Train a model of your own on one sequence, whose tokens or heads several processes divide.

    torchrun --nproc-per-node 2 examples/context_parallel.py           # CPUs or GPUs
    torchrun --nproc-per-node 2 examples/context_parallel.py --heads   # divides the heads

The losses are those of one process.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from nsa_core import NSAConfig, NSAttention
from nsa_core.parallel import ContextParallel, HeadParallel, Shards, pad_to


class Block(nn.Module):
    """A block of a transformer without its MLP."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.attn = NSAttention(NSAConfig(dim=64, n_heads=4, n_kv_heads=2))

    def forward(self, x, cu_seqlens, max_seqlen):
        """Return x [T, 64] with the attention to its documents added."""
        return x + self.attn(self.norm(x), cu_seqlens, max_seqlen)


class Model(nn.Module):
    """A language model over bytes."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens, cu_seqlens, max_seqlen):
        """Return logits [T, 256]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cu_seqlens, max_seqlen)
        return self.head(x)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--heads", action="store_true", help="divide the heads instead of the tokens")
parser.add_argument("--steps", type=int, default=3)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
world = dist.get_world_size()
parts = 1 if options.heads else world  # of each row
mesh = init_device_mesh(device, (parts, world // parts), mesh_dim_names=("tokens", "heads"))

torch.manual_seed(0)
model = Model().to(device)
if options.heads:
    parallelize_module(model, mesh["heads"], {"blocks.*.attn": HeadParallel()})
else:
    parallelize_module(model, mesh["tokens"], {"blocks.*.attn": ContextParallel()})
for block in model.blocks:
    fully_shard(block, mesh=mesh["tokens"])
fully_shard(model, mesh=mesh["tokens"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

total = pad_to(1000, 8)  # a number of rows that 1, 2, 4 and 8 ranks can share
shards = Shards(total, parts, mesh["tokens"].get_local_rank())
text = torch.randint(256, (total + 1,), device=device)  # the same on all ranks
documents = torch.tensor([0, 300, 1000, total], dtype=torch.int32, device=device)
losses = []
for _ in range(options.steps):
    logits = model(shards.take(text[:-1]), documents, 700)
    loss = F.cross_entropy(logits, shards.take(text[1:]))  # of the rows of this rank
    loss.backward()  # FSDP averages the gradients over the ranks
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / world
    dist.all_reduce(mean)
    losses.append(f"{mean:.4f}")
if dist.get_rank() == 0:
    print("losses:", *losses)
dist.destroy_process_group()
