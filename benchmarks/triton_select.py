"""select of the triton backend on a GPU: checked against the oracle's rule on small shapes, then timed at the anchors.

    python benchmarks/triton_select.py [--quick] [--skip-check] [--shapes 0,1,2] [--configs 0,1,2]

One line per shape, data and configuration: ms, and TFLOP/s of the product over visible compressed tokens. A
configuration that fails prints its error and the rest go on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import time

import torch
import triton

from nsa_backend_triton import configs, select
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from nsa_core.verify.regret import judge_selection

GEOMETRY = BlockGeometry(32, 16, 64, 16, 1, 2, 512)
ANCHORS = [(64, 4, 128, 65536), (32, 8, 128, 32768), (12, 2, 64, 65536)]
BASE = {"COLUMNS": 128, "KEYS": 64, "Q_BYTES": 65536, "ROWS": 8, "CHUNKS": 16, "LANES": 32, "PROGRAMS": 2}
BASE |= {"num_warps": 4, "num_stages": 2}
CONFIGS = [
    BASE,
    BASE | {"ROWS": 16},
    BASE | {"CHUNKS": 8},
    BASE | {"ROWS": 16, "CHUNKS": 32},
    BASE | {"num_stages": 3, "Q_BYTES": 32768, "PROGRAMS": 3},
    BASE | {"COLUMNS": 64, "Q_BYTES": 32768, "PROGRAMS": 3},
    BASE | {"COLUMNS": 256},
    BASE | {"KEYS": 128, "num_warps": 8, "PROGRAMS": 1},
    BASE | {"KEYS": 128, "num_warps": 8, "COLUMNS": 256, "num_stages": 3, "PROGRAMS": 1},
    BASE | {"KEYS": 128, "num_warps": 8, "Q_BYTES": 131072, "num_stages": 2, "PROGRAMS": 1},
]


def inputs(
    heads: int, groups: int, dim: int, length: int, peak: float, dtype: torch.dtype, geometry: BlockGeometry = GEOMETRY
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [1, S, Hq, D], k_cmp [1, n_c, G, D] and their lse [1, Hq, S]; ``peak`` is the deviation of the logits."""
    torch.manual_seed(length + heads)
    q = (torch.randn(1, length, heads, dim, device="cuda") * peak).to(dtype)
    k = torch.randn(1, geometry.num_compressed(length), groups, dim, device="cuda").to(dtype)
    lse = torch.full((1, heads, length), -torch.inf, device="cuda")
    last = torch.arange(k.shape[1], device="cuda") * geometry.compress_stride + geometry.compress_block_size - 1
    for head in range(heads):
        keys = k[0, :, head * groups // heads].float()
        for at in range(0, length, 8192):
            rows = torch.arange(at, min(at + 8192, length), device="cuda")
            logits = q[0, rows, head].float() @ keys.T * dim**-0.5
            lse[0, head, rows] = logits.masked_fill_(last > rows[:, None], -torch.inf).logsumexp(-1)
    return q, k, lse


def check() -> None:
    """Every dtype, several numbers of heads and geometries against the regret rule on sampled rows."""
    other, odd = BlockGeometry(16, 8, 48, 16, 0, 0, 64), BlockGeometry(32, 32, 64, 40, 2, 3, 64)
    torch.backends.cuda.matmul.allow_tf32 = False
    for heads, groups, dim, length, dtype, geometry, peak in [
        (64, 4, 128, 4096, torch.bfloat16, GEOMETRY, 1.0),
        (32, 8, 128, 4096, torch.bfloat16, GEOMETRY, 4.0),
        (12, 2, 64, 40000, torch.bfloat16, GEOMETRY, 1.0),
        (7, 1, 96, 3000, torch.float16, other, 1.0),
        (3, 3, 192, 5000, torch.bfloat16, odd, 2.0),
        (8, 2, 64, 2000, torch.float32, GEOMETRY, 1.0),
        (64, 4, 128, 4096, torch.bfloat16, GEOMETRY, 0.0),
    ]:
        name = f"{heads}/{groups}/{dim} S={length} {str(dtype)[6:]} l'={geometry.select_block_size} x{peak:g}"
        try:
            q, k, lse = inputs(heads, groups, dim, length, peak, dtype, geometry)
            call = SlotCall(geometry, dim**-0.5, None, length)
            blocks = select.forward(q, k, lse, call=call)
            rows = [*torch.randperm(length)[:120].tolist(), 0, 1, 31, 32, length - 1]
            judged = judge_selection(q, k, lse, blocks, geometry, dim**-0.5, rows=sorted(set(rows)))
            again = bool(torch.equal(blocks, select.forward(q, k, lse, call=call)))
            verdict = "ok" if judged.ok and again else f"WRONG {judged.why} same bits twice: {again}"
            print(f"{name:55s} {verdict} regret {judged.regret:.2f} flips {judged.flip_rate:.3%}", flush=True)
        except Exception as error:  # the other cases still tell something
            print(f"{name:55s} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)


def measure(shape: tuple[int, int, int, int], peak: float, settings: list[configs.Settings]) -> None:
    """A line per configuration: first call, median ms, TFLOP/s."""
    heads, groups, dim, length = shape
    q, k, lse = inputs(*shape, peak, torch.bfloat16)
    call = SlotCall(GEOMETRY, dim**-0.5, None, length)
    visible = sum(GEOMETRY.num_compressed(t + 1) for t in range(length))
    first = None
    for setting in settings:
        change = {key: value for key, value in setting.items() if BASE.get(key) != value}
        start = time.perf_counter()
        try:
            blocks = select.forward(q, k, lse, call=call, settings=setting)
            torch.cuda.synchronize()
            compiled = time.perf_counter() - start
            ms = triton.testing.do_bench(
                lambda s=setting: select.forward(q, k, lse, call=call, settings=s),
                warmup=50,
                rep=250,
                return_mode="median",
            )
            first = blocks if first is None else first
            same = (blocks == first).all(-1).float().mean().item()
            rate = 2 * visible * heads * dim / ms / 1e9
            print(f"{heads}/{groups}/{dim} S={length} x{peak:g} {change or 'base'}: {ms:.3f} ms {rate:.0f} TFLOP/s, "
                  f"{same:.3%} sets as the first, first call {compiled:.1f} s", flush=True)  # fmt: skip
        except Exception as error:
            print(f"{heads}/{groups}/{dim} {change}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def compile_one(job: tuple[tuple[int, int, int, int], configs.Settings]) -> None:
    """Put the binary of a shape and configuration into Triton's cache: it serves every S."""
    (heads, groups, dim, _), setting = job
    q, k, lse = inputs(heads, groups, dim, 256, 1.0, torch.bfloat16)
    select.forward(q, k, lse, call=SlotCall(GEOMETRY, dim**-0.5, None, 256), settings=setting)


def precompile(shapes: list[tuple[int, int, int, int]], settings: list[configs.Settings]) -> None:
    """All binaries at once, in processes: one takes some ten seconds. Failures show again when measured."""
    start, context = time.perf_counter(), multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(12, mp_context=context) as pool:
        list(
            concurrent.futures.as_completed(
                [pool.submit(compile_one, job) for job in itertools.product(shapes, settings)]
            )
        )
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first configuration only")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--shapes", default="0,1,2", help="anchors by number")
    parser.add_argument("--configs", default=",".join(map(str, range(len(CONFIGS)))), help="configurations by number")
    given = parser.parse_args()
    shapes = [ANCHORS[int(i)] for i in given.shapes.split(",")]
    settings = [CONFIGS[int(i)] for i in ("0" if given.quick else given.configs).split(",")]
    if not given.quick:
        precompile(shapes, settings)
    for shape in shapes:
        measure(shape, 1.0, settings)
    for shape in shapes:
        measure(shape, 4.0, settings[:1])
    if not given.skip_check:
        check()


if __name__ == "__main__":
    main()
