"""Run every kernel of the Triton backend once on small shapes, for compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python benchmarks/kernels/triton_sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/kernels/triton_sanitize.py

Prints one line per case; the result is the sanitizer's own summary. racecheck takes minutes;
``--shape`` and ``--part`` select cases, so that several processes can share them.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

from nsa_core import NSAConfig, block_attention, nsa_attention, resolve
from nsa_core.contract import SLOTS
from nsa_verify.cases import Case
from nsa_verify.checks.decode_fused import append_parity, fused_gates, step_parity
from nsa_verify.checks.decode_parity import Step
from nsa_verify.combination import Combination
from nsa_verify.slot_runs import run_slots

SHAPES = {
    "12/2/64": {"n_heads": 12, "n_kv_heads": 2, "head_dim": 64},
    "2/2/96": {"n_heads": 2, "n_kv_heads": 2, "head_dim": 96},
    "16/1/192/128": {"n_heads": 16, "n_kv_heads": 1, "head_dim": 192, "v_head_dim": 128},
}


PARTS = ("dense", "packed", "buckets", "decode", "core", "blocks")
LENGTHS = {
    "dense": (150,),
    "packed": (0, 33, 100, 1, 0),
    "buckets": (4200,),  # long enough for the bucket path of sel
    "core": (150, 4200),
}


def main() -> None:
    """Run every slot, the core with one backward, block_attention, and decode steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", action="append", choices=list(SHAPES), help="repeatable; default all"
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="repeatable; default all")
    options = parser.parse_args()
    for name in options.shape or SHAPES:
        config = NSAConfig(dim=64, rope=False, **SHAPES[name])
        for part in options.part or PARTS:
            if part == "decode":
                decode(name, config)
            elif part == "core":
                core(name, config)
            elif part == "blocks":
                blocks(name, config)
            else:
                slots(name, config, part)


def slots(name: str, config: NSAConfig, part: str) -> None:
    """Call every slot, forward and backward, with and without deterministic gradients."""
    packed = part == "packed"
    for deterministic in (False, True):
        case = Case(name, config, LENGTHS[part], packed=packed)
        plan = resolve(
            config,
            device="cuda",
            dtype=torch.bfloat16,
            backends="triton",
            needs_grad=True,
            varlen=packed,
            deterministic=deterministic,
        )
        run_slots(plan, case, case.data(torch.bfloat16, "cuda"))
        torch.cuda.synchronize()
        print(f"{name}, {part}, deterministic {deterministic}: ran", flush=True)


def leaves(config: NSAConfig, length: int) -> list[torch.Tensor]:
    """Return random q, k and v that require gradients."""
    heads, dk, dv = config.n_kv_heads, config.head_dim, config.v_head_dim
    shapes = ((config.n_heads, dk), (heads, dk), (heads, dv))
    tensors = [torch.randn(1, length, *s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


def core(name: str, config: NSAConfig) -> None:
    """Run the whole core with the backward of all branches together."""
    config = dataclasses.replace(config, compress="mean")
    plan = resolve(config, device="cuda", dtype=torch.bfloat16, backends="triton", needs_grad=True)
    for length in LENGTHS["core"]:
        tensors = leaves(config, length)
        gates = torch.rand(1, length, config.n_heads, 3, device="cuda", requires_grad=True)
        o = nsa_attention(*tensors, gates, config=config, plan=plan, nonnegative_gates=True)
        torch.autograd.grad(o, (*tensors, gates), torch.ones_like(o))
        torch.cuda.synchronize()
        print(f"{name}, core of {length} tokens: ran", flush=True)


def blocks(name: str, config: NSAConfig) -> None:
    """Run block_attention with small and large blocks, forward and backward."""
    for size in (16, 128, 256):
        tensors = leaves(config, 700)
        chosen = torch.randint(-1, 45, (1, 700, config.n_kv_heads, 6), device="cuda")
        o = block_attention(*tensors, chosen, block_size=size, backends="triton")
        torch.autograd.grad(o, tensors, torch.ones_like(o))
        torch.cuda.synchronize()
        print(f"{name}, blocks of {size}: ran", flush=True)


def decode(name: str, config: NSAConfig) -> None:
    """Run a step, its append and its gates, for one token per sequence and for several."""
    subject = Combination(dict.fromkeys(SLOTS, "triton"), "cuda")
    for new in ((1, 1, 0), (3, 1, 2)):
        step = Step(Case(name, config, ()), (1500, 70, 40), new, max(new), page_size=128)
        findings = [
            *step_parity(subject, step, torch.bfloat16),
            *fused_gates(subject, step, torch.bfloat16),
        ]
        findings += append_parity(
            subject, step, torch.bfloat16, rope=True, rotate_raw=False, raw_ring=40
        )
        failures = [f.quantity for f in findings if not f.ok]
        print(f"{name}, decode of {new}: {failures or 'ran'}", flush=True)


if __name__ == "__main__":
    main()
