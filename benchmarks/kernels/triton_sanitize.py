"""Run every kernel of the Triton backend once on small shapes, for compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python benchmarks/kernels/triton_sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/kernels/triton_sanitize.py

Prints one line per case; the result is the sanitizer's own summary. racecheck takes minutes;
``--shape`` and ``--part`` select cases, so that several processes can share them. The part
"partial" has queries that begin inside a sequence (``first_query`` in nsa_core.contract).
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

from nsa_core import NSAConfig, block_attention, nsa_attention, resolve
from nsa_core.contract import SLOTS
from nsa_core.plan.plan import Plan
from nsa_verify.checks.decode_compress import fused_compress
from nsa_verify.checks.decode_fused import append_parity, fused_gates, fused_step
from nsa_verify.drawn.partial_levels import PARTIAL_SLOTS
from nsa_verify.problems.cases import Case, CaseData
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.slot_runs import SlotRun, run_kernel, run_slots, slot_inputs
from nsa_verify.problems.steps import Step

DEVICE = "cuda"
SHAPES = {
    "12/2/64": {"n_heads": 12, "n_kv_heads": 2, "head_dim": 64},
    "2/2/96": {"n_heads": 2, "n_kv_heads": 2, "head_dim": 96},
    "16/1/192/128": {"n_heads": 16, "n_kv_heads": 1, "head_dim": 192, "v_head_dim": 128},
}

PARTS = ("dense", "packed", "buckets", "partial", "decode", "core", "blocks")
LENGTHS = {
    "dense": (150,),
    "packed": (0, 33, 100, 1, 0),
    "buckets": (4200,),  # long enough for the bucket path of sel
    "core": (150, 4200),
}
# The queries of the part "partial": (first row, row behind the last) on the axis of the keys.
CUTS = {
    # Inside selection blocks of 64 tokens, from one border to the next, and to the last key.
    "dense": ((70, 101), (64, 128), (50, 150)),
    # Inside a document, from one border to the next, from one document into the next, and over
    # the documents of 1 and 0 tokens to the last key.
    "packed": ((50, 100), (33, 133), (20, 90), (120, 134)),
    "buckets": ((2100, 4150),),
}


def main() -> None:
    """Run whole and partial slots, decode steps, the core and block_attention."""
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
            if part == "partial":
                partial(name, config)
            elif part == "decode":
                decode(name, config)
            elif part == "core":
                core(name, config)
            elif part == "blocks":
                blocks(name, config)
            else:
                slots(name, config, part)


def slots(name: str, config: NSAConfig, part: str) -> None:
    """Call every slot, forward and backward, with and without deterministic gradients."""
    case = Case(name, config, LENGTHS[part], packed=part == "packed")
    for deterministic in (False, True):
        plan = plan_of(case, deterministic=deterministic)
        run_slots(plan, case, case.data(torch.bfloat16, DEVICE))
        torch.cuda.synchronize()
        print(f"{name}, {part}, deterministic {deterministic}: ran", flush=True)


def partial(name: str, config: NSAConfig) -> None:
    """Call cmp, select, sel and win with queries that begin inside a sequence.

    The calls are forward and backward, with and without deterministic gradients.
    """
    for kind, cuts in CUTS.items():
        case = Case(name, config, LENGTHS[kind], packed=kind == "packed")
        data = case.data(torch.bfloat16, DEVICE)
        for deterministic in (False, True):
            plan = plan_of(case, deterministic=deterministic, partial=True)
            for first, end in cuts:
                run_cut(plan, data, first, end)
                torch.cuda.synchronize()
                cut = f"{kind}, queries {first} to {end - 1}"
                print(f"{name}, partial, {cut}, deterministic {deterministic}: ran", flush=True)


def plan_of(case: Case, **fields: bool) -> Plan:
    """Return the plan of a case on the triton backend, with gradients."""
    return resolve(
        case.config,
        device=DEVICE,
        dtype=torch.bfloat16,
        backends="triton",
        needs_grad=True,
        varlen=case.packed,
        **fields,
    )


def run_cut(plan: Plan, data: CaseData, first: int, end: int) -> dict[str, SlotRun]:
    """Run each slot that reads keys on the query rows ``first`` to ``end - 1`` and all keys."""
    q, do = (x.narrow(-3, first, end - first) for x in (data.q, data.do))
    part = dataclasses.replace(data, q=q, do=do)
    runs: dict[str, SlotRun] = {}
    for slot in PARTIAL_SLOTS:
        inputs = slot_inputs(slot, part, runs)
        gradient = None if slot == "select" else do
        runs[slot] = run_kernel(getattr(plan, slot), inputs, gradient, part, first)
    return runs


def leaves(config: NSAConfig, length: int) -> list[torch.Tensor]:
    """Return random q, k and v that require gradients."""
    heads, dk, dv = config.n_kv_heads, config.head_dim, config.v_head_dim
    shapes = ((config.n_heads, dk), (heads, dk), (heads, dv))
    tensors = [torch.randn(1, length, *s, device=DEVICE, dtype=torch.bfloat16) for s in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


def core(name: str, config: NSAConfig) -> None:
    """Run the whole core with the backward of all branches together."""
    config = dataclasses.replace(config, compress="mean")
    plan = resolve(config, device=DEVICE, dtype=torch.bfloat16, backends="triton", needs_grad=True)
    for length in LENGTHS["core"]:
        tensors = leaves(config, length)
        gates = torch.rand(1, length, config.n_heads, 3, device=DEVICE, requires_grad=True)
        o = nsa_attention(*tensors, gates, config=config, plan=plan, nonnegative_gates=True)
        torch.autograd.grad(o, (*tensors, gates), torch.ones_like(o))
        torch.cuda.synchronize()
        print(f"{name}, core of {length} tokens: ran", flush=True)


def blocks(name: str, config: NSAConfig) -> None:
    """Run block_attention with small and large blocks, forward and backward."""
    for size in (16, 128, 256):
        tensors = leaves(config, 700)
        chosen = torch.randint(-1, 45, (1, 700, config.n_kv_heads, 6), device=DEVICE)
        o = block_attention(*tensors, chosen, block_size=size, backends="triton")
        torch.autograd.grad(o, tensors, torch.ones_like(o))
        torch.cuda.synchronize()
        print(f"{name}, blocks of {size}: ran", flush=True)


def decode(name: str, config: NSAConfig) -> None:
    """Run a step and the forms before it, for one token per sequence and for several."""
    subject = Combination(dict.fromkeys(SLOTS, "triton"), DEVICE)
    for new in ((1, 1, 0), (3, 1, 2)):
        step = Step(Case(name, config, ()), (1500, 70, 40), new, max(new), page_size=128)
        findings = [
            *fused_step(subject, step, torch.bfloat16),
            *fused_gates(subject, step, torch.bfloat16),
            *fused_compress(subject, step, torch.bfloat16),
        ]
        findings += append_parity(
            subject, step, torch.bfloat16, rope=True, rotate_raw=False, raw_ring=40
        )
        failures = [f.quantity for f in findings if not f.ok]
        print(f"{name}, decode of {new}: {failures or 'ran'}", flush=True)


if __name__ == "__main__":
    main()
