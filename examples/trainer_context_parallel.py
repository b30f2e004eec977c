"""Divide the tokens of every row over the processes, in the Trainer of transformers.

    torchrun --nproc-per-node 2 examples/trainer_context_parallel.py   # tiny; CPUs or GPUs
    torchrun --nproc-per-node 8 examples/trainer_context_parallel.py --model MODEL \\
        --text BOOK --length 1048576
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_model import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import nsa_models.hf  # noqa: F401  # registers the models with transformers
from nsa_core.parallel import ContextParallel, Shards

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="folder of an NSA model and its tokenizer; default: a tiny one")
parser.add_argument("--text", help="a long text; its end is cut to whole rows", default=__file__)
parser.add_argument("--length", type=int, default=512, help="tokens of a row, over all processes")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--out", default="context-parallel")
options = parser.parse_args()


class ContextParallelTrainer(Trainer):
    """A Trainer whose processes all have the same rows, and each a part of their tokens."""

    def get_train_dataloader(self) -> DataLoader:
        """Return the rows in one order for all processes; accelerate would divide them."""
        size = self.args.per_device_train_batch_size
        return DataLoader(self.train_dataset, size, collate_fn=self.data_collator)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the loss of this process, whose mean over the processes is that of the rows."""
        ids, labels = inputs["input_ids"], inputs["labels"]
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)  # shifted before they are divided
        shards = Shards(ids.shape[1], dist.get_world_size(), dist.get_rank())
        loss = model(
            shards.take(ids, 1),
            shift_labels=shards.take(targets, 1),
            num_items_in_batch=(targets != -100).sum(),
            use_cache=False,
        ).loss
        return loss * dist.get_world_size()  # DDP averages the gradients


on_gpu = torch.cuda.is_available()
arguments = TrainingArguments(
    options.out,
    max_steps=options.steps,
    per_device_train_batch_size=1,
    learning_rate=1e-2 if options.model is None else 1e-5,
    logging_steps=1,
    use_cpu=not on_gpu,
    bf16=on_gpu,
    report_to=[],
)
with arguments.main_process_first():  # it creates the process group
    folder = options.model or tiny_model(f"{options.out}/tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
mesh = init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),))
parallelize_module(model, mesh, {"model.layers.*.self_attn": ContextParallel()})
with open(options.text, encoding="utf-8") as file:
    ids = AutoTokenizer.from_pretrained(folder)(file.read() * 4, return_tensors="pt").input_ids[0]
rows = [{"input_ids": row, "labels": row} for row in ids.split(options.length)[:-1]]
trainer = ContextParallelTrainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if trainer.is_world_process_zero():
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
