"""Write compile_table.json: the resources of every kernel on the GPUs that it ships for.

    python tests/triton/tools/compile_table.py [--output FILE]

Each kernel is compiled for sm_80 and sm_90 with the tile shapes that ship, from the launches that a
call of its slot makes: 64 query heads over 4 kv heads (``h=4``: over 16), 8192 tokens, l=32, d=16,
l'=64, n=16, w=512, forward and backward. Three variants of sel have l'=128 and n=256 (with
``h=4``, 16384 tokens), and two have l'=256. ``long`` rows have 262144 tokens. ``short`` rows are
the kernels of sel and win that sequences of 1024 tokens run instead. In ``partial`` rows the
queries are the second half of their sequences.
``core`` is the backward of all slots together, without the kernels that the backwards of the slots
launch alike. ``step`` is a decode step, its append, gates and compression (phi of kind mlp), 32
sequences of 65536 tokens, one new token each; ``steps`` has four each, and phi of kinds linear and
mean. Rows over quantized pages have the kernels that differ from those over pages of bf16, and rows
with ``page scales`` those that differ where pages have scales of their own. This needs no GPU:
kernels are compiled for GPUs that are not present, see offline.py.

Every run of the tests compiles the rows whose launch changed,
for example because a tile of tuned/*.json did; ``nox -s full`` compiles all rows. Each row must
stay within its GPU's shared memory and the limit of spilled bytes, and must have the stored figures
where triton's version is the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

import offline
from nsa_backend_triton.core import backward as core_backward
from nsa_backend_triton.decode import append, compress, forms, gates
from nsa_backend_triton.host import configs
from nsa_backend_triton.meta_inputs import (
    STEP_INPUTS,
    core_inputs,
    slot_module,
    step_inputs,
)
from nsa_core.contract import KV_DTYPES, SLOTS, PageScales, Request
from nsa_core.dryrun import slot_inputs
from nsa_core.layout import BlockGeometry

FILE = Path(__file__).with_name("compile_table.json")
ARCHITECTURES = (80, 90)
# (Dk, Dv) per dtype; float16 compiles to the same resources as bfloat16.
SHAPES = {
    "bfloat16": ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)),
    "float32": ((64, 64), (256, 256)),
}
CORE = "core"  # the fused backward
STEPS = {"step": 1, "steps": 4}  # new tokens per sequence
# Limits in bytes per thread, stores and loads together. The fp32 kernels verify the compiled logic;
# they need not be fast.
MAX_SPILLS = {"bfloat16": 512, "float32": 1152}
# Rows that may spill more. The tile was the fastest of those tried for the window on sm_80, which
# spills 408 bytes; none has been tried with given statistics.
MORE_SPILLS: Mapping[str, int] = {
    "span_dq | sm_80 | core | 64/64 bfloat16": 520,
    "span_dq | sm_80 | core, packed | 64/64 bfloat16": 520,
    # The tile is that of bf16; none has been tried for codes.
    "decode_span | sm_80 | steps, float8_e4m3fn, page scales | 128/128 bfloat16": 552,
}
# Rows whose asynchronous products (wgmma, sm_90 alone) ptxas serializes, with the codes of its
# warnings: C7512, too few registers, and C7515, sums that other instructions define while products
# are in flight. A test fails on any other warning.
SERIALIZED: Mapping[str, tuple[str, ...]] = {
    # Too few registers for two programs per multiprocessor, but the fastest of nine settings on an
    # H200.
    "span_forward | sm_90 | cmp | 128/128 bfloat16": ("C7512",),
    "span_forward | sm_90 | cmp, packed | 128/128 bfloat16": ("C7512",),
    "span_forward | sm_90 | cmp, partial | 128/128 bfloat16": ("C7512",),
    "span_forward | sm_90 | cmp, partial, packed | 128/128 bfloat16": ("C7512",),
    "span_forward | sm_90 | win | 128/128 bfloat16": ("C7512",),
    "span_forward | sm_90 | win, packed | 128/128 bfloat16": ("C7512",),
    "span_forward | sm_90 | win, partial | 128/128 bfloat16": ("C7512",),
    "span_forward | sm_90 | win, partial, packed | 128/128 bfloat16": ("C7512",),
}
_BASE = Request(
    slot="cmp",
    geometry=BlockGeometry(),
    n_heads=64,
    n_kv_heads=4,
    head_dim=128,
    v_head_dim=128,
    dtype="bfloat16",
    device="cuda",
    needs_grad=True,
    batch=1,
    seq_len=8192,
)


def launches(request: Request, architecture: int) -> list[offline.RecordedLaunch]:
    """Return the launches of a call of ``request.slot``, and of its backward if requested."""
    do, tensors, call = slot_inputs(request)
    module = slot_module(request.slot)
    with offline.recording(architecture) as recorded:
        out = module.forward(*tensors, call=call)
        if request.needs_grad and request.slot != "select":
            module.backward(do, *tensors, *(out if request.slot != "combine" else ()), call=call)
    return recorded


def core_launches(request: Request, architecture: int) -> list[offline.RecordedLaunch]:
    """Return the launches of the fused backward whose kernels its slots do not launch alike."""
    do, tensors, outputs, call = core_inputs(request)
    with offline.recording(architecture) as recorded:
        core_backward.backward(do, *tensors, outputs=outputs, call=call)
    return [x for x in recorded if x.name in ("combine_statistics", "span_dq", "span_dkdv")]


def step_launches(
    request: Request,
    architecture: int,
    rows: int = 1,
    ragged: bool = False,
    page_scales: bool = False,
) -> list[offline.RecordedLaunch]:
    """Return the launches of a fused decode step of ``rows`` tokens.

    ``ragged``: each run names its sequence, and win and raw have tables of two columns.
    ``page_scales``: quantized pages have scales of their own.
    """
    tensors, call = step_inputs(request, rows)
    if call.scales is not None and not page_scales:
        scales = PageScales(*(x[:1].expand(len(x), -1, -1) for x in call.scales))
        call = dataclasses.replace(call, scales=scales)
    if ragged:
        newest = call.starts.new_empty(len(call.starts), 2)
        tables = call.tables._replace(win=newest, raw=newest)
        call = dataclasses.replace(call, tables=tables, sequences=call.starts)
    q, lead = tensors["q"], tensors["q"].shape[:2]
    k, v = (q.new_empty((*lead, *tensors[f"{x}_win"].shape[2:])) for x in "kv")
    table = q.new_empty((call.max_len, q.shape[3] // 2), dtype=tensors["gates"].dtype)
    sel, win = ((tensors[f"k_{name}"], tensors[f"v_{name}"]) for name in ("sel", "win"))
    raw = tuple(torch.empty_like(x, dtype=q.dtype) for x in win)
    with offline.recording(architecture) as recorded:
        append.append(
            q, (k,) * 3, (v,) * 3, raw, sel, win, rope=(table, table), rotate_raw=False, call=call
        )
        x = q.flatten(2)
        gates.gates(
            x, x.new_empty(3 * q.shape[2], x.shape[2]), x.new_empty(3 * q.shape[2]), call=call
        )
        weights = [phi_weights(x, call.geometry, is_mlp=rows == 1) for x in raw]
        for phis in (weights, ((), ())) if rows > 1 else (weights,):
            compress.compress(
                *raw, tensors["k_cmp"], tensors["v_cmp"], *phis, rope=(table, table), call=call
            )
        forms.step(*(tensors[name] for name in STEP_INPUTS["step"]), call=call)
    return recorded


def phi_weights(
    x: torch.Tensor, geometry: BlockGeometry, *, is_mlp: bool
) -> tuple[torch.Tensor, ...]:
    """Return uninitialised weights of phi for x [.., D] as the fused form compress takes them."""
    size, width = geometry.compress_block_size, x.shape[-1]
    hidden = 2 * width if is_mlp else width
    shapes: list[tuple[int, ...]] = [(size, width), (hidden, size * width), (hidden,)]
    shapes += [(width, hidden), (width,)] if is_mlp else []
    return tuple(x.new_empty(shape) for shape in shapes)


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel as launched for one request.

    Attributes:
        launch: the recorded launch.
        slot: the slot and the variant of the request, such as "sel, h=4".
        head_dim: Dk of the request.
        v_head_dim: Dv of the request.
        dtype: dtype of the request.
    """

    launch: offline.RecordedLaunch
    slot: str
    head_dim: int
    v_head_dim: int
    dtype: str

    @property
    def request(self) -> dict[str, Any]:
        """The fields of the row's entry that do not depend on the compiler."""
        return {
            "kernel": self.launch.name,
            "gpu": f"sm_{self.launch.architecture}",
            "slot": self.slot,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim,
            "dtype": self.dtype,
            "launch": self.launch.digest,
        }

    @property
    def title(self) -> str:
        """The row's name, such as "span_forward | sm_90 | cmp | 128/128 bfloat16"."""
        return title(self.request)

    @property
    def max_spills(self) -> int:
        """Bytes per thread that it may spill."""
        return MORE_SPILLS.get(self.title, MAX_SPILLS[self.dtype])

    @property
    def accepted_serialized(self) -> tuple[str, ...]:
        """Codes of the accepted warnings about serialized products."""
        return SERIALIZED.get(self.title, ())

    def entry(self, cost: offline.Cost) -> dict[str, Any]:
        """Return the row's object in the JSON file: its request, then the fields of ``cost``."""
        figures = dataclasses.asdict(cost)
        return {
            **self.request,
            **{name: list(x) if isinstance(x, tuple) else x for name, x in figures.items()},
        }


def title(entry: Mapping[str, Any]) -> str:
    """Return the title of an entry of the JSON file; rows of one title differ in their launch."""
    widths = f"{entry['head_dim']}/{entry['v_head_dim']}"
    return " | ".join((entry["kernel"], entry["gpu"], entry["slot"], f"{widths} {entry['dtype']}"))


def rows(
    shapes: Mapping[str, Sequence[tuple[int, int]]] = SHAPES,
    slots: tuple[str, ...] = (*SLOTS, CORE, *STEPS),
) -> Iterator[Row]:
    """Yield every kernel of ``slots`` for each architecture, dtype and width with settings."""
    for slot in slots:
        for architecture in ARCHITECTURES:
            for dtype, widths in shapes.items():
                for dk, dv in widths:
                    base = dataclasses.replace(_BASE, dtype=dtype, head_dim=dk, v_head_dim=dv)
                    if slot in STEPS:
                        yield from _step_rows(base, architecture, slot)
                    elif slot == CORE:
                        yield from _core_rows(base, architecture)
                    else:
                        yield from _slot_rows(dataclasses.replace(base, slot=slot), architecture)


def _step_rows(base: Request, architecture: int, slot: str) -> Iterator[Row]:
    request = dataclasses.replace(
        base, phase="decode", needs_grad=False, batch=32, seq_len=65536, page_size=128
    )
    variants: list[tuple[str, bool, str | None, bool]] = [("", False, None, False)]
    if (base.head_dim, base.v_head_dim, base.dtype) == (128, 128, "bfloat16"):
        variants.append((", ragged", True, None, False))
        for name in KV_DTYPES:
            variants += [(f", {name}", False, name, False)]
            variants += [(f", {name}, page scales", False, name, True)]
    seen: set[object] = set()
    for variant, ragged, kv_dtype, page_scales in variants:
        quantized = dataclasses.replace(request, kv_dtype=kv_dtype)
        for launch in step_launches(quantized, architecture, STEPS[slot], ragged, page_scales):
            if not kv_dtype or launch.binary not in seen:
                seen.add(launch.binary)
                yield Row(launch, slot + variant, base.head_dim, base.v_head_dim, base.dtype)


def _core_rows(base: Request, architecture: int) -> Iterator[Row]:
    for variant, varlen in (("", False), (", packed", True)):
        for launch in core_launches(dataclasses.replace(base, varlen=varlen), architecture):
            yield Row(launch, CORE + variant, base.head_dim, base.v_head_dim, base.dtype)


def _slot_rows(base: Request, architecture: int) -> Iterator[Row]:
    seen: set[object] = set()
    variants: list[tuple[str, dict[str, Any]]] = [("", {})]
    if base.slot == "sel":
        variants.append((", deterministic", {"deterministic": True}))
    # small groups have tile shapes of their own, and kernels that larger groups never launch
    if base.slot in ("select", "sel"):
        variants.append((", h=4", {"n_kv_heads": base.n_heads // 4}))
    if base.slot == "select":  # more blocks than the rows of short sequences take
        variants.append((", long", {"seq_len": 2**18}))
        variants.append((", long, h=4", {"seq_len": 2**18, "n_kv_heads": base.n_heads // 4}))
    if base.slot in ("cmp", "win") and architecture == 90 and base.dtype != "float32":
        # descriptors serve dense calls only, so packed calls have rows of their own
        variants.append((", packed", {"varlen": True}))
    if base.slot != "combine" and (base.head_dim, base.dtype) == (128, "bfloat16"):
        variants.append((", partial", {"partial": True}))
        variants.append((", partial, packed", {"partial": True, "varlen": True}))
        if base.slot == "sel":  # longer lists have tiles of fewer tokens
            blocks = {"geometry": BlockGeometry(128, 128, 128, 256, 0, 0)}
            variants.append((", l'=128, n=256", blocks))
            variants.append((", l'=128, n=256, deterministic", {**blocks, "deterministic": True}))
            # longer than SHARE_ALL_MAX_LEN
            few_heads = {"n_kv_heads": base.n_heads // 4, "seq_len": 16384}
            variants.append((", l'=128, n=256, h=4", {**blocks, **few_heads}))
            blocks = {"geometry": BlockGeometry(256, 256, 256, 16, 0, 0)}
            variants.append((", l'=256", blocks))
            variants.append((", l'=256, h=4", {**blocks, "n_kv_heads": base.n_heads // 4}))
            # sorted pairs, and offsets of 64 bits
            variants.append((", long", {"seq_len": 2**18}))
    short: dict[str, Any] = {"seq_len": 1024}
    if base.slot in ("sel", "win"):
        variants.append((", short", short))
    if base.slot == "sel" and (base.head_dim, base.dtype) == (128, "bfloat16"):
        variants.append((", short, h=4", {**short, "n_kv_heads": base.n_heads // 4}))
        packed = {**short, "partial": True, "varlen": True}
        variants.append((", short, partial, packed", packed))
    for variant, changes in variants:
        request = dataclasses.replace(base, **changes)
        if configs.missing(request, architecture):
            continue
        for launch in launches(request, architecture):
            if ", short" in variant and not launch.name.startswith(("sel_bitmask", "span_dkdv")):
                continue
            if launch.binary not in seen:
                seen.add(launch.binary)
                yield Row(launch, base.slot + variant, base.head_dim, base.v_head_dim, base.dtype)


def as_json(entries: Iterable[Mapping[str, Any]], triton_version: str) -> str:
    """Return the text of the JSON file, with one entry a line so that diffs are readable."""
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    return f'{{"triton": {json.dumps(triton_version)}, "rows": [\n{lines}\n]}}\n'


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile every row and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=FILE, metavar="FILE", help="default: %(default)s"
    )
    output: Path = parser.parse_args(arguments).output
    entries = [row.entry(offline.cost(row.launch)) for row in rows()]
    output.write_text(as_json(entries, triton.__version__))
    print(f"{len(entries)} rows written to {output}")


if __name__ == "__main__":
    main()
