"""Train torchtitan's tiny Llama with NSA: FSDP2, selective checkpointing, packed documents.

torchrun --nproc-per-node 2 examples/torchtitan_train.py            # on GPUs, or on the CPU
torchrun --nproc-per-node 2 examples/torchtitan_train.py --compile
"""

import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule

divide = FSDPModule.set_gradient_divide_factor


def divide_after_sum(module: FSDPModule, factor: float) -> None:
    """Set the divisor of gradients; gloo has no sum that scales its summands."""
    module.set_force_sum_reduction_for_comms(True)
    divide(module, factor)


if not torch.cuda.is_available():  # torchtitan is written for accelerators
    cpu = torch.cpu
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu.get_device_properties = lambda device=None: type("CPU", (), {"total_memory": 1 << 34})
    cpu.get_device_name = lambda device=None: "CPU"
    cpu.memory_stats = lambda device=None: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda device=None: None
    FSDPModule.set_gradient_divide_factor = divide_after_sum

import torchtitan.distributed.utils  # noqa: E402
from datasets import Dataset  # noqa: E402
from tiny_model import byte_tokenizer  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig, text_datasets  # noqa: E402
from torchtitan.models.llama3 import config_registry  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan_nsa import flops_per_token  # noqa: E402

if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3.0 calls it; torch 2.13 has none
    torchtitan.distributed.utils.set_pg_timeouts = lambda timeout, parallel_dims: None

init_logger()
out = Path("torchtitan-nsa")
byte_tokenizer().save_pretrained(out)
texts = Path(__file__).read_text(encoding="utf-8").split("\n\n") * 50
text_datasets.DATASETS["texts"] = DatasetConfig(
    "", lambda path: Dataset.from_dict({"text": texts}), lambda row: row["text"]
)
config = config_registry.llama3_debugmodel_varlen_attn()  # with selective checkpointing
config.model_spec.model.layers = config.model_spec.model.layers[:2]
config.hf_assets_path = config.dump_folder = str(out)
config.dataloader = text_datasets.HuggingFaceTextDataLoader.Config(dataset="texts")
fields = {"window_size": 64, "num_selected_blocks": 4}
config.override.imports = [("torchtitan_nsa.nsa", fields)]
config.training.seq_len, config.training.local_batch_size, config.training.steps = 256, 1, 5
config.checkpoint.enable = config.validator.enable = False
config.parallelism.spmd_backend = "partial_dtensor"
config.compile.enable = "--compile" in sys.argv
trainer = config.build()
flops = flops_per_token(trainer.model_parts[0], config.training.seq_len)
trainer.metrics_processor.num_flops_per_token = flops
trainer.train()
trainer.close()
torch.distributed.destroy_process_group()
