"""Write docs/kernels.md: the resources of every kernel on the GPUs that it ships for.

    python -m nsa_backend_triton.tools.compile_table > docs/kernels.md

This needs no GPU: kernels are compiled from the launches that a call would make, see
nsa_backend_triton.tools.offline.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence

import triton

from nsa_backend_triton.decode import append, forms, gates
from nsa_backend_triton.host import configs
from nsa_backend_triton.tools import offline
from nsa_backend_triton.tools.meta_inputs import STEP_INPUTS, inputs, slot_module, step_inputs
from nsa_core.contract import SLOTS, Request
from nsa_core.layout import BlockGeometry

ARCHITECTURES = (80, 90)
# (Dk, Dv) per dtype; float16 compiles to the same resources as bfloat16.
SHAPES = {
    "bfloat16": ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)),
    "float32": ((64, 64), (256, 256)),
}
STEPS = {"step": 1, "steps": 4}  # new tokens per sequence
MOST_SPILLS = {"bfloat16": 512, "float32": 1152}  # bytes per thread, stores and loads together
# Rows whose asynchronous products (wgmma) ptxas serializes, with its warnings. Any other warning
# fails a test.
SERIALIZED: Mapping[str, tuple[str, ...]] = {
    # Too few registers for two programs per multiprocessor, but the fastest of nine settings on an
    # H200.
    "span_forward | sm_90 | cmp | 128/128 bfloat16": ("C7512",),
    "span_forward | sm_90 | cmp, packed | 128/128 bfloat16": ("C7512",),
    "span_forward | sm_90 | win | 128/128 bfloat16": ("C7512",),
    "span_forward | sm_90 | win, packed | 128/128 bfloat16": ("C7512",),
    # Products in flight across iterations. The effect on the time has not been measured.
    "sel_block_backward | sm_90 | sel, h=4 | 96/96 bfloat16": ("C7515",),
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
_HEAD = """# What the Triton kernels take

Written by `nsa_backend_triton.tools.compile_table`, with triton {version}, on a machine without
a GPU: each kernel is compiled for sm_80 (A100: {s80} KiB of shared memory a block) and sm_90
(H100, H200: {s90} KiB) with the tile shapes that ship, from the launches that a call of its
slot makes: 64 query heads over 4 groups (`h=4`: over 16), 8192 tokens, l=32, d=16, l'=64, n=16,
w=512, forward and backward; `step`: a decode step and its append, 32 sequences of 65536 tokens,
one new token each, `steps`: four each. A test compiles a part of this table again in every
ordinary run, and all of it in `nox -s full`: shared memory within the limit, at most {narrow}
bytes a thread spilled in bfloat16 and {wide} in float32 (which is there to verify the compiled
logic, not to be fast); the figures as printed here where triton's version is the same.

The last column holds the codes of ptxas's warnings that it serializes a kernel's asynchronous
products (wgmma, sm_90 alone): C7512, too few registers, and C7515, sums that other instructions
define while products are in flight. The rows with a warning are listed in
`nsa_backend_triton.tools.compile_table`; a test fails on any other.

sm_86, 89, 120 and 121 have 99 KiB a block and a table of tile shapes of their own; sm_87 shares
that of sm_80, sm_100 and sm_103 that of sm_90. Kernels have been measured on sm_90 only.
"""


def launches(request: Request, architecture: int) -> list[offline.RecordedLaunch]:
    """Return the launches of a call of ``request.slot``, and of its backward if requested."""
    do, given, call = inputs(request)
    module = slot_module(request.slot)
    with offline.recording(architecture) as made:
        out = module.forward(*given, call=call)
        if request.needs_grad and request.slot != "select":
            module.backward(do, *given, *(out if request.slot != "combine" else ()), call=call)
    return made


def step_launches(
    request: Request, architecture: int, rows: int = 1
) -> list[offline.RecordedLaunch]:
    """Return the launches of a fused decode step of ``rows`` tokens: append, gates, step."""
    given, call = step_inputs(request, rows)
    q, lead = given["q"], given["q"].shape[:2]
    k, v = (q.new_empty((*lead, *given[f"{x}_win"].shape[2:])) for x in "kv")
    table = q.new_empty((call.max_len, q.shape[3] // 2), dtype=given["gates"].dtype)
    sel, win = ((given[f"k_{name}"], given[f"v_{name}"]) for name in ("sel", "win"))
    with offline.recording(architecture) as made:
        append.append(
            q, (k,) * 3, (v,) * 3, win, sel, win, rope=(table, table), rotate_raw=False, call=call
        )
        x = q.flatten(2)
        gates.gates(
            x, x.new_empty(3 * q.shape[2], x.shape[2]), x.new_empty(3 * q.shape[2]), call=call
        )
        forms.step(*(given[name] for name in STEP_INPUTS["step"]), call=call)
    return made


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel as launched for one request."""

    launch: offline.RecordedLaunch
    title: str  # "span_forward | sm_90 | cmp | 128/128 bfloat16"
    dtype: str

    @property
    def most_spills(self) -> int:
        """Bytes per thread that it may spill."""
        return MOST_SPILLS[self.dtype]

    @property
    def accepted_serialized(self) -> tuple[str, ...]:
        """Codes of the accepted warnings about serialized products."""
        return SERIALIZED.get(self.title, ())

    def line(self) -> str:
        """Compile the kernel and return its row of the table."""
        cost = offline.cost(self.launch)
        kib = f"{cost.shared / 1024:.1f}"
        names = (", ".join(cost.instructions) or "-", ", ".join(cost.serialized) or "-")
        return f"| {self.title} | {kib} | {cost.registers} | {cost.spills} | {' | '.join(names)} |"


def rows(
    shapes: Mapping[str, Sequence[tuple[int, int]]] = SHAPES,
    slots: tuple[str, ...] = (*SLOTS, *STEPS),
) -> Iterator[Row]:
    """Yield every kernel of ``slots`` for each architecture, dtype and width with settings."""
    for slot in slots:
        for architecture in ARCHITECTURES:
            for dtype, widths in shapes.items():
                for dk, dv in widths:
                    asked = dataclasses.replace(_BASE, dtype=dtype, head_dim=dk, v_head_dim=dv)
                    if slot in STEPS:
                        yield from _step_rows(asked, architecture, slot)
                    else:
                        yield from _rows_of(dataclasses.replace(asked, slot=slot), architecture)


def _step_rows(asked: Request, architecture: int, slot: str) -> Iterator[Row]:
    request = dataclasses.replace(
        asked, phase="decode", needs_grad=False, batch=32, seq_len=65536, page_size=128
    )
    for launch in step_launches(request, architecture, STEPS[slot]):
        width = f"{asked.head_dim}/{asked.v_head_dim} {asked.dtype}"
        yield Row(launch, f"{launch.name} | sm_{architecture} | {slot} | {width}", asked.dtype)


def _rows_of(asked: Request, architecture: int) -> Iterator[Row]:
    seen: set[object] = set()
    modes: list[tuple[str, dict[str, int]]] = [("", {})]
    if asked.slot == "sel":
        modes.append((", deterministic", {"deterministic": True}))
    # small groups have tile shapes of their own, and kernels that larger groups never launch
    if asked.slot in ("select", "sel"):
        modes.append((", h=4", {"n_kv_heads": asked.n_heads // 4}))
    if asked.slot in ("cmp", "win") and architecture == 90 and asked.dtype != "float32":
        # descriptors serve dense calls only, so packed calls have rows of their own
        modes.append((", packed", {"varlen": True}))
    for mode, changes in modes:
        request = dataclasses.replace(asked, **changes)  # type: ignore[arg-type]
        if configs.missing(request, architecture):
            continue
        for launch in launches(request, architecture):
            if launch.binary not in seen:
                seen.add(launch.binary)
                width = f"{asked.head_dim}/{asked.v_head_dim} {asked.dtype}"
                yield Row(
                    launch,
                    f"{launch.name} | sm_{architecture} | {asked.slot}{mode} | {width}",
                    asked.dtype,
                )


def page() -> Iterator[str]:
    """Yield the page as Markdown, line by line."""
    limits = {f"s{a}": offline.SHARED[a] // 1024 for a in ARCHITECTURES}
    narrow, wide = MOST_SPILLS["bfloat16"], MOST_SPILLS["float32"]
    yield _HEAD.format(version=triton.__version__, narrow=narrow, wide=wide, **limits)
    yield (
        "| kernel | GPU | slot | Dk/Dv | shared KiB | registers | spilled bytes | instructions |"
        " wgmma serialized |"
    )
    yield "|---" * 9 + "|"
    for row in rows():
        yield row.line()


if __name__ == "__main__":
    for text in page():
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
