"""Replace the attention of torchtitan's Llama by NSA, with its override mechanism.

    torchrun --nproc-per-node 2 examples/torchtitan_nsa.py           # tiny, FSDP2, on CPUs or GPUs
    PYTHONPATH=examples torchrun ... -m torchtitan.train ... --override.imports torchtitan_nsa.nsa
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

if not torch.cuda.is_available():
    import torchtitan_on_cpu  # noqa: F401
import torchtitan.distributed.utils
from datasets import Dataset
from tiny_model import byte_tokenizer
from torchtitan.config import derive, override
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.rope import ComplexRoPE
from torchtitan.models.llama3.config_registry import llama3_debugmodel_varlen_attn
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import init_logger

from nsa_core import NSAConfig, NSAttention, attention_flops

if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3.0 calls it; torch 2.13 has none
    torchtitan.distributed.utils.set_pg_timeouts = lambda timeout, parallel_dims: None


class TitanNSA(Module, NSAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        nsa: NSAConfig

    def __init__(self, config: Config) -> None:
        NSAttention.__init__(self, config.nsa)
        for child in self.modules():  # torchtitan takes modules of its own class only
            if child is not self:
                child.__class__ = type(type(child).__name__, (Module, type(child)), {})

    def forward(self, x, attention_masks, positions=None):
        documents, longest = attention_masks.cu_seq_q, attention_masks.max_q
        return NSAttention.forward(self, x.flatten(0, 1), documents, longest).view_as(x)


@override(target=GQAttention.Config)
def nsa(config: GQAttention.Config, **fields) -> TitanNSA.Config:
    """Return the configuration of the layer; ``fields`` are those of NSAConfig.

    The decoder needs ``attn_backend="varlen"``, whose masks are the boundaries of documents.
    """
    assert isinstance(config.rope, ComplexRoPE.Config)
    frequencies = replace(config.rope, max_seq_len=2).build().cache[1].angle()
    layer = NSAConfig(
        dim=config.dim,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads or config.n_heads,
        head_dim=config.head_dim,
        rope_frequencies=tuple(frequencies.tolist()),
        **fields,
    )
    return derive(config, TitanNSA.Config, nsa=layer, sharding_config=None)


def from_dense(state: dict[str, torch.Tensor], head_dim: int) -> dict[str, torch.Tensor]:
    """Return NSA weights for those of a GQAttention, whose rotary pairs are neighbours."""
    q, k, v = (state[f"qkv_linear.w{name}.weight"] for name in "qkv")
    q, k = (w.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2) for w in (q, k))
    return {"qkv.weight": torch.cat([q, k, k, k, v, v, v]), "out.weight": state["wo.weight"]}


if __name__ == "__main__":
    init_logger()
    out = Path("titan")
    byte_tokenizer().save_pretrained(out)
    text = Path(__file__).read_text().split("\n\n") * 50  # packed documents
    DATASETS["text"] = DatasetConfig(
        "", lambda path: Dataset.from_dict({"text": text}), lambda row: row["text"]
    )
    config = llama3_debugmodel_varlen_attn()  # with selective activation checkpointing
    config.hf_assets_path = config.dump_folder = str(out)
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="text")
    fields = {"window_size": 64, "num_selected_blocks": 4}
    config.override.imports = [("torchtitan_nsa.nsa", fields)]
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 256, 1, 5
    config.checkpoint.enable = config.validator.enable = False
    config.parallelism.spmd_backend = "partial_dtensor"  # spmd_types wants shardings of all modules
    config.compile.enable = "--compile" in sys.argv
    trainer = config.build()
    model, length = trainer.model_parts[0], config.training.seq_len
    weights = [p.numel() for name, p in model.named_parameters() if "tok_embeddings" not in name]
    layers = [module.config for module in model.modules() if isinstance(module, NSAttention)]
    attention = sum(attention_flops(layer, length) for layer in layers)
    trainer.metrics_processor.num_flops_per_token = 6 * sum(weights) + attention / length
    trainer.train()
    trainer.close()
