"""Train a reward model and a policy of preferences with TRL's RewardTrainer and DPOTrainer.

python examples/trl_preferences.py                # tiny, on the CPU
python examples/trl_preferences.py --model MODEL --gpu
"""

import argparse

from datasets import Dataset
from tiny_model import tiny_model
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

import nsa_models.hf  # noqa: F401  # registers the models with transformers

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="folder of an NSA model and its tokenizer; default: a tiny one")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--gpu", action="store_true", help="train in bfloat16 on a GPU")
parser.add_argument("--out", default="trl-preferences")
options = parser.parse_args()

model = options.model or tiny_model(f"{options.out}/tiny")
context = "The three branches read compressed, selected and recent tokens. " * 4
pairs = Dataset.from_list(
    [
        {
            "prompt": f"{context}\nWhat is {n} + {n}? ",
            "chosen": f"It is {2 * n}.",
            "rejected": f"I cannot say, {n}!",
        }
        for n in range(64)
    ]
)
common = {
    "max_steps": options.steps,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3 if options.model is None else 1e-5,
    "logging_steps": 1,
    "use_cpu": not options.gpu,
    "bf16": options.gpu,
    "report_to": [],
}


def report(name: str, trainer: DPOTrainer | RewardTrainer) -> None:
    """Train, and print the first and the last loss."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")


policy = AutoModelForCausalLM.from_pretrained(model)  # the reference is a copy, loaded by its path
arguments = DPOConfig(f"{options.out}/dpo", **common)
report("dpo", DPOTrainer(policy, args=arguments, train_dataset=pairs))
arguments = RewardConfig(f"{options.out}/reward", **common)
report("reward", RewardTrainer(model, args=arguments, train_dataset=pairs))
