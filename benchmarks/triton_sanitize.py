"""Every kernel of the triton backend once, small, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python benchmarks/triton_sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python benchmarks/triton_sanitize.py

Prints a line per case; the sanitizer's own summary is the result.
"""

from __future__ import annotations

import torch

from nsa_core import NSAConfig, resolve
from nsa_core.verify.cases import Case
from nsa_core.verify.subject import run_slots

SHAPES = {
    "12/2/64": {"n_heads": 12, "n_kv_heads": 2, "head_dim": 64},
    "h=1, 96": {"n_heads": 2, "n_kv_heads": 2, "head_dim": 96},
    "16/1 192/128": {"n_heads": 16, "n_kv_heads": 1, "head_dim": 192, "v_head_dim": 128},
}


def main() -> None:
    """Forward and backward of every slot, dense and packed, in both modes; one case long enough to bucket pairs."""
    for name, shape in SHAPES.items():
        config = NSAConfig(dim=64, rope=False, **shape)
        for lengths, packed in (((150,), False), ((0, 33, 100, 1, 0), True), ((4200,), False)):
            for deterministic in (False, True):
                case = Case(name, config, lengths, packed=packed)
                plan = resolve(
                    config, device="cuda", dtype=torch.bfloat16, backends="triton", needs_grad=True, varlen=packed,
                    deterministic=deterministic,
                )  # fmt: skip
                run_slots(plan, case, case.data(torch.bfloat16, "cuda"))
                torch.cuda.synchronize()
                print(f"{name}, {lengths}, deterministic {deterministic}: ran", flush=True)


if __name__ == "__main__":
    main()
