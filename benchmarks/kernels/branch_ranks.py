"""Time cmp and win of triton and of fa2; the rank of fa2 in `auto` is based on it.

    python benchmarks/rehearse.py --arch 80 -- python benchmarks/kernels/branch_ranks.py --json FILE

A row is a slot, a shape and a number of tokens: ms of the forward alone, and of forward and
backward together ("training"), in bf16, one sequence, launched from Python. The backends take
turns, twice; a time is the smaller one of two medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nsa_core import NSAConfig, resolve
from nsa_core.errors import NSAError

SHAPES = (
    "64/4/128",
    "32/8/128",
    "12/2/64",
    "28/4/128",
    "64/8/128",
    "16/2/96",
    "48/6/80",
    "32/32/64",
    "16/1/128",
    "8/1/256",
    "32/2/64",
    "64/4/64",
)
TOKENS = (1024, 4096, 16384, 65536)
BACKENDS = ("triton", "fa2")


def median_ms(call: Callable[[], object], samples: int) -> float:
    """Return the median ms of ``samples`` calls, after one that is not timed."""
    call()
    times = []
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def calls(slot: str, shape: str, tokens: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (name of a field of the row, call), for each backend that takes the request."""
    heads, groups, width = map(int, shape.split("/"))
    config = NSAConfig(dim=heads * width, n_heads=heads, n_kv_heads=groups, head_dim=width)
    keys = config.geometry.num_compressed(tokens) if slot == "cmp" else tokens

    def normal(rows: int, count: int) -> torch.Tensor:
        return torch.randn(1, rows, count, width, device="cuda", dtype=torch.bfloat16)

    q, k, v, do = (
        normal(n, h) for n, h in ((tokens, heads), *[(keys, groups)] * 2, (tokens, heads))
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for backend in BACKENDS:
        try:
            plan = resolve(
                config,
                device="cuda",
                dtype=torch.bfloat16,
                backends={slot: backend},
                needs_grad=True,
                batch=1,
                seq_len=tokens,
            )
        except NSAError as error:
            print(f"{slot} {shape} {tokens} {backend}: {error}")
            continue
        kernel = getattr(plan, slot)

        def forward(kernel: Any = kernel) -> object:
            with torch.no_grad():
                return kernel(*leaves)

        def training(kernel: Any = kernel) -> object:
            return torch.autograd.grad(kernel(*leaves)[0], leaves, do)

        yield f"{backend}_forward_ms", forward
        yield f"{backend}_training_ms", training


def measure(slot: str, shape: str, tokens: int) -> dict[str, Any]:
    """Return the row of a slot, a shape and a number of tokens."""
    times: dict[str, list[float]] = {}
    timed = dict(calls(slot, shape, tokens))
    for _ in range(2):
        for name, call in timed.items():
            times.setdefault(name, []).append(median_ms(call, 7 if tokens <= 16384 else 3))
    best = {name: round(min(samples), 4) for name, samples in times.items()}
    return {"slot": slot, "shape": shape, "tokens": tokens, **best}


def main() -> None:
    """Time every row, print it, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="Hq/G/D")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    rows = []
    for tokens in map(int, arguments.tokens.split(",")):
        for shape in arguments.shapes:
            for slot in ("cmp", "win"):
                rows.append(measure(slot, shape, tokens))
                print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    if arguments.json:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
