"""Train an NSA model with accelerate on several processes, with DDP or FSDP2.

torchrun --nproc-per-node 2 examples/accelerate_train.py              # DDP, tiny; CPUs or GPUs
torchrun --nproc-per-node 2 examples/accelerate_train.py --fsdp --model MODEL --length 32768
"""

import argparse
import itertools

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from speed import Speed
from tiny_model import tiny_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening

import nsa_models.hf  # noqa: F401  # registers the models with transformers

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="folder of an NSA model and its tokenizer; default: a tiny one")
parser.add_argument("--text", help="file whose paragraphs are the documents", default=__file__)
parser.add_argument("--length", type=int, default=512, help="tokens of a packed row")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--fsdp", action="store_true", help="shard with FSDP2 instead of DDP")
parser.add_argument("--out", default="accelerate")
options = parser.parse_args()

on_gpu = torch.cuda.is_available()
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],  # of the dense family; its layers stay
)
accelerator = Accelerator(
    cpu=not on_gpu,
    mixed_precision="bf16" if on_gpu else "no",
    fsdp_plugin=plugin if options.fsdp else None,
)
folder = options.model or f"{options.out}/tiny"
if options.model is None and accelerator.is_main_process:
    tiny_model(folder)
accelerator.wait_for_everyone()
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
with open(options.text, encoding="utf-8") as file:
    texts = [text for text in file.read().split("\n\n") if text.strip()]
ids = tokenizer(texts * (1 + 4000 // len(texts)))["input_ids"]
documents = [{"input_ids": document[: options.length]} for document in ids]
flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")


def pack(batch):
    """Return documents in one row, as many as fit."""
    ends = itertools.accumulate(len(document["input_ids"]) for document in batch)
    return flatten([document for document, end in zip(batch, ends) if end <= options.length])


rows = DataLoader(documents, batch_size=1 + options.length // 64, collate_fn=pack, shuffle=True)
set_seed(0)  # the same order of documents on all processes
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if options.model is None else 1e-5)
model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
losses, tokens, speed = [], 0, Speed()
for _, batch in zip(range(options.steps), rows):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
    tokens += accelerator.num_processes * batch["input_ids"].numel()
    speed.on_step_end()
state = accelerator.get_state_dict(model)  # of the whole model, on every process
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained(f"{options.out}/trained", state_dict=state)
report = speed.report(tokens / options.steps)
accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}\n{report}")
accelerator.end_training()
