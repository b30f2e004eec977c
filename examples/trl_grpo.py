"""Train an NSA model on a reward of its own answers with TRL's GRPOTrainer.

python examples/trl_grpo.py                # tiny, on the CPU
python examples/trl_grpo.py --model MODEL --gpu
"""

import argparse

from datasets import Dataset
from tiny_model import tiny_model
from trl import GRPOConfig, GRPOTrainer

import nsa_models.hf  # noqa: F401  # registers the models with transformers

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="folder of an NSA model and its tokenizer; default: a tiny one")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--gpu", action="store_true", help="train in bfloat16 on a GPU")
parser.add_argument("--out", default="trl-grpo")
options = parser.parse_args()


def share_of_letters(completions: list[str], **columns: object) -> list[float]:
    """Return the reward of each answer: its share of letters and spaces."""
    return [sum(c.isalpha() or c == " " for c in text) / max(1, len(text)) for text in completions]


prompts = Dataset.from_dict({"prompt": [f"{n} names of a colour: " * 8 for n in range(32)]})
arguments = GRPOConfig(
    output_dir=options.out,
    beta=0.05,  # weight of the KL divergence to the first model, a second copy loaded by path
    num_generations=8,
    per_device_train_batch_size=8,
    max_completion_length=24,
    max_steps=options.steps,
    learning_rate=3e-3 if options.model is None else 1e-6,
    logging_steps=1,
    use_cpu=not options.gpu,
    bf16=options.gpu,
    report_to=[],
)
trainer = GRPOTrainer(
    model=options.model or tiny_model(f"{options.out}/tiny"),
    reward_funcs=share_of_letters,
    args=arguments,
    train_dataset=prompts,
)
trainer.train()
logs = [entry for entry in trainer.state.log_history if "reward" in entry]
print(f"reward {logs[0]['reward']:.3f} -> {logs[-1]['reward']:.3f}, KL {logs[-1]['kl']:.4f}")
