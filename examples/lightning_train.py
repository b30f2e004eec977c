"""Train an NSA model in Lightning's Trainer on packed documents.

python examples/lightning_train.py                              # tiny, on the CPU
python examples/lightning_train.py --model MODEL --length 32768 --devices 8
"""

import argparse

import lightning
import torch
from tiny_model import tiny_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening

import nsa_models.hf  # noqa: F401  # registers the models with transformers

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="folder of an NSA model and its tokenizer; default: a tiny one")
parser.add_argument("--length", type=int, default=1024, help="tokens of a packed row, at most")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument(
    "--devices", type=int, default=1, help="processes, each with a GPU if there are"
)
parser.add_argument("--out", default="lightning")
options = parser.parse_args()


class FineTuning(lightning.LightningModule):
    """The training step and the optimizer of an NSA model."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.model.gradient_checkpointing_enable()
        self.losses = []

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a packed row."""
        loss = self.model(**batch, use_cache=False).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW for all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2 if options.model is None else 1e-5)


lightning.seed_everything(0)
folder = options.model or tiny_model(f"{options.out}/tiny")
with open(__file__, encoding="utf-8") as file:
    texts = [text for text in file.read().split("\n\n") if text.strip()] * 50
ids = AutoTokenizer.from_pretrained(folder)(texts, max_length=options.length // 4, truncation=True)
documents = [{"input_ids": document} for document in ids["input_ids"]]
# Four documents in a row, whose boundaries the model gets as cu_seq_lens_q.
flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
on_gpu = torch.cuda.is_available()
trainer = lightning.Trainer(
    max_steps=options.steps,
    accelerator="gpu" if on_gpu else "cpu",
    devices=options.devices,
    precision="bf16-mixed" if on_gpu else "32-true",
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
)
model = FineTuning(folder).train()
trainer.fit(model, DataLoader(documents, batch_size=4, shuffle=True, collate_fn=flatten))
model.model.save_pretrained(f"{options.out}/trained")
print(f"loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f}")
