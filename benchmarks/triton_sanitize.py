"""Every kernel of the triton backend once, small, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python benchmarks/triton_sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python benchmarks/triton_sanitize.py

Prints a line per case; the sanitizer's own summary is the result.
"""

from __future__ import annotations

import torch

from nsa_core import NSAConfig, resolve
from nsa_core.contract import SLOTS
from nsa_core.verify.cases import Case
from nsa_core.verify.decode import Step
from nsa_core.verify.decode_fused import append_parity, step_parity
from nsa_core.verify.subject import Subject, run_slots

SHAPES = {
    "12/2/64": {"n_heads": 12, "n_kv_heads": 2, "head_dim": 64},
    "h=1, 96": {"n_heads": 2, "n_kv_heads": 2, "head_dim": 96},
    "16/1 192/128": {"n_heads": 16, "n_kv_heads": 1, "head_dim": 192, "v_head_dim": 128},
}


def main() -> None:
    """Forward and backward of every slot, dense and packed, in both modes; one case long enough to bucket pairs.

    Then decode steps of one and of several tokens, with their append.
    """
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
        subject = Subject(dict.fromkeys(SLOTS, "triton"), "cuda")
        for new in ((1, 1, 0), (3, 1, 2)):
            step = Step(Case(name, config, ()), (1500, 70, 40), new, max(new), page_size=128)
            findings = [*step_parity(subject, step, torch.bfloat16)]
            findings += append_parity(subject, step, torch.bfloat16, rope=True, rotate_raw=False, raw_ring=40)
            wrong = [f.quantity for f in findings if not f.ok]
            print(f"{name}, decode of {new}: {wrong or 'ran'}", flush=True)


if __name__ == "__main__":
    main()
