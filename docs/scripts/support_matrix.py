"""Write docs/reference/backends.md: the requests that this project's own backends support.

    python docs/scripts/support_matrix.py > docs/reference/backends.md

Run it on a machine without a GPU and with a CPU build of torch. Probes see metadata only, so the
requests describe GPUs that the machine does not have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nsa_core.contract import SLOTS, Reason, Request
from nsa_core.layout import BlockGeometry
from nsa_core.plan.candidates import facts_of_this_machine, probe_candidate
from nsa_core.plan.gpus import gpu_named
from nsa_core.plan.loading import BackendEntry
from nsa_core.plan.registry import Registry, discover
from nsa_core.util.text import one_line

DEVICES: tuple[tuple[str, str, tuple[int, int] | None], ...] = (
    ("CPU", "cpu", None),
    *(
        (gpu.architecture, "cuda", gpu.capability)
        for gpu in map(gpu_named, ("sm_75", "sm_80", "sm_90", "sm_120"))
    ),
)
_BASE = Request(
    slot="cmp",
    geometry=BlockGeometry(),
    n_heads=12,
    n_kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    dtype="bfloat16",
    needs_grad=True,
    batch=1,
    seq_len=4096,
)
_HEAD = """# Backends

By default, `auto` takes the fastest backend that supports a request. Each backend ranks itself for
a device and a shape, by measured times; [`nsa tune`](../how-to/benchmark.md#compare-draw-tune)
ranks them by times on your machine. To choose yourself, name a backend for the layer or for single
[slots](../start/concepts.md#words-of-this-library):

```python
from nsa_core import NSAConfig, NSAttention, resolve

config = NSAConfig(dim=256, n_heads=8, n_kv_heads=2)
attention = NSAttention(config, backends={"win": "sdpa"})  # the others: auto
attention = NSAttention(config, backends="sdpa")  # every slot
plan = resolve(config, device="cpu", dtype="float32", needs_grad=True)
print(plan.explain())
```

If a backend that you name cannot run, the call raises an error with every reason; no other kernel
runs in its place. `explain()` has the choices and the reasons, and `nsa backends explain` prints
them for any request, also for a GPU that you do not have. A call takes a plan by
`attention(x, plan=plan)`.

In sequences of at most n * l' tokens, 1024 by default, every token selects all its blocks, so
causal attention by the window kernel replaces select and sel. Exceptions: training on a backend
with one backward for all slots, such as Triton in bf16; calls with `blocks`; graphs exported or
compiled for several lengths.

## Supported requests

Each row names changes to a base request: 12 query heads in 2 groups, Dk = Dv = 64, 4096 tokens,
bfloat16 and the paper's block sizes. A cell lists the devices on which the backend runs all slots
that it offers, or those after a colon, with gradients except in decode steps. "all" is the CPU and
every GPU from sm_75 (T4) on, "sm_80+" every GPU from sm_80 (A100) on, "-" none. The code for sm_80
and sm_86 was verified and measured on an H100 or H200, not on an A100 or RTX 3090. Tile shapes of
other GPUs come from one of these two or from sm_90.
"""


def _requests() -> Iterator[tuple[str, Request]]:
    """Yield (label, request) of each row."""
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        yield dtype, dataclasses.replace(_BASE, dtype=dtype)
    yield "deterministic", dataclasses.replace(_BASE, deterministic=True)
    yield "packed documents", dataclasses.replace(_BASE, varlen=True)
    yield "queries that begin inside a sequence", dataclasses.replace(_BASE, partial=True)
    yield "float64, 65536 tokens", dataclasses.replace(_BASE, dtype="float64", seq_len=65536)
    yield "batch of 100000", dataclasses.replace(_BASE, batch=100_000)
    for heads, groups in ((2, 2), (7, 1), (64, 4), (64, 1)):
        yield (
            f"{heads} heads over {groups}",
            dataclasses.replace(_BASE, n_heads=heads, n_kv_heads=groups),
        )
    for dk, dv in ((65, 65), (96, 96), (192, 128), (256, 256), (320, 320)):
        yield f"Dk={dk}, Dv={dv}", dataclasses.replace(_BASE, head_dim=dk, v_head_dim=dv)
    step = dataclasses.replace(_BASE, phase="decode", needs_grad=False)
    yield "decode", step
    for dtype in ("float32", "float64"):
        yield f"decode, {dtype}", dataclasses.replace(step, dtype=dtype)
    for page in (64, 128, 4096):
        yield f"decode, pages of {page} tokens", dataclasses.replace(step, page_size=page)
    yield "decode, Dk=192, Dv=128", dataclasses.replace(step, head_dim=192, v_head_dim=128)
    yield "decode, 64 heads over 4", dataclasses.replace(step, n_heads=64, n_kv_heads=4)


def support_matrix(registry: Registry) -> str:
    """Return the page as Markdown: a table of the backends of ``registry``, and their slots."""
    refusals = {entry.name: _refusals(entry) for entry in registry.entries if entry.spec}
    sections = [_HEAD, _table(refusals)]
    for entry in registry.entries:
        title = f"## {one_line(entry.name)}\n"
        if entry.spec is None:
            sections.append(f"{title}\n{entry.status.capitalize()}: {one_line(entry.reason)}.\n")
            continue
        offered = ", ".join(slot for slot in SLOTS if slot in entry.spec.slots)
        summary = one_line(entry.spec.summary)
        sections.append(f"{title}\n{summary[:1].upper()}{summary[1:]}. Offers {offered}.\n")
    return "\n".join(sections)


_Refusals = dict[tuple[str, str, str], tuple[tuple[Reason, ...], tuple[Reason, ...]]]


def _refusals(entry: BackendEntry) -> _Refusals:
    """Return (label, device, slot) -> (reasons with gradients, reasons without).

    Facts of the generating machine are left out.
    """
    assert entry.spec is not None  # only ready backends are probed
    refusals: _Refusals = {}
    for label, base in _requests():
        for title, device, capability in DEVICES:
            for slot in entry.spec.slots:
                request = dataclasses.replace(base, slot=slot, device=device, capability=capability)
                forward = dataclasses.replace(request, needs_grad=False)
                refusals[label, title, slot] = (
                    probe_candidate(entry, request).reasons,
                    probe_candidate(entry, forward).reasons,
                )
    here = facts_of_this_machine(entry)
    return {
        key: (
            tuple(reason for reason in full if reason not in here),
            tuple(reason for reason in forward if reason not in here),
        )
        for key, (full, forward) in refusals.items()
    }


def _table(refusals: dict[str, _Refusals]) -> str:
    """Return a row for all requests with the same cells, and a column per backend."""
    labels: dict[tuple[str, ...], list[str]] = {}
    for label, _ in _requests():
        cells = tuple(_cell(facts, label) for facts in refusals.values())
        labels.setdefault(cells, []).append(label)
    rows = [["; ".join(same), *cells] for cells, same in labels.items()]
    rows = [["request", *map(one_line, refusals)], ["---"] * (len(refusals) + 1), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(refusals: _Refusals, label: str) -> str:
    """Return the devices that run all slots, then those that run some, with these slots."""
    offered = [slot for slot in SLOTS if (label, DEVICES[0][0], slot) in refusals]
    devices: dict[str, list[str]] = {}
    for title, _, _ in DEVICES:
        reasons = {slot: refusals[label, title, slot] for slot in offered}
        with_grad = [slot for slot, (full, _) in reasons.items() if not full]
        no_grad = [slot for slot, (full, forward) in reasons.items() if full and not forward]
        parts = [", ".join(with_grad)] if with_grad and with_grad != offered else []
        parts += [f"forward of {', '.join(no_grad)}"] if no_grad else []
        if with_grad or no_grad:
            devices.setdefault("; ".join(parts), []).append(title)
    cells = [
        f"{_range(titles)}: {slots}" if slots else _range(titles)
        for slots, titles in sorted(devices.items())
    ]
    return "; ".join(cells) or "-"


def _range(titles: list[str]) -> str:
    """Return ["CPU", "sm_80", "sm_90", "sm_120"] as "CPU, sm_80+", and all devices as "all"."""
    everything = [title for title, _, _ in DEVICES]
    if titles == everything:
        return "all"
    gpus = [title for title in titles if title in everything[1:]]
    if len(gpus) > 1 and gpus == everything[-len(gpus) :]:
        titles = [title for title in titles if title not in gpus] + [f"{gpus[0]}+"]
    return ", ".join(titles)


if __name__ == "__main__":
    print(support_matrix(discover(safe=True)), end="")
