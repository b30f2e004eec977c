"""Fine-tune an NSA model on long packed documents with TRL's SFTTrainer.

python examples/trl_sft.py                                            # tiny, on the CPU
python examples/trl_sft.py --model MODEL --length 32768 --lora --gpu  # a folder of nsa convert
"""

import argparse

from datasets import Dataset
from peft import LoraConfig
from speed import Speed
from tiny_model import tiny_model
from trl import SFTConfig, SFTTrainer

import nsa_models.hf  # noqa: F401  # registers the models with transformers

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="folder of an NSA model and its tokenizer; default: a tiny one")
parser.add_argument("--text", help="file whose paragraphs are the documents", default=__file__)
parser.add_argument("--length", type=int, default=2048, help="tokens of a packed row")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--padding-free", action="store_true", help="flatten batches, without packing")
parser.add_argument("--lora", action="store_true", help="train adapters, phi and the gates only")
parser.add_argument("--gpu", action="store_true", help="train in bfloat16 on a GPU")
parser.add_argument("--out", default="trl-sft")
options = parser.parse_args()

with open(options.text, encoding="utf-8") as file:
    paragraphs = [text for text in file.read().split("\n\n") if text.strip()]
documents = Dataset.from_dict({"text": paragraphs * (1 + 400 // len(paragraphs))})
lora = LoraConfig(r=8, target_modules=["qkv", "out"], modules_to_save=["phi_k", "phi_v", "gate"])
arguments = SFTConfig(
    output_dir=options.out,
    max_length=None if options.padding_free else options.length,
    packing=not options.padding_free,  # strategy "bfd": whole documents, best fit
    padding_free=True,  # no padding between documents: the model reads their boundaries
    per_device_train_batch_size=8 if options.padding_free else 1,
    max_steps=options.steps,
    learning_rate=1e-2 if options.model is None else 1e-4,
    logging_steps=1,
    gradient_checkpointing=True,
    use_cpu=not options.gpu,
    bf16=options.gpu,
    report_to=[],
)
trainer = SFTTrainer(
    model=options.model or tiny_model(f"{options.out}/tiny"),
    args=arguments,
    train_dataset=documents,
    peft_config=lora if options.lora else None,
    callbacks=[speed := Speed()],
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
tokens = max(entry.get("num_tokens", 0) for entry in trainer.state.log_history)
print(speed.report(tokens / options.steps))
