"""docs/backends.md: which backend takes what, as the probes of this project's own backends answer.

    python -m nsa_cli.support_matrix > docs/backends.md

Run it where there is no GPU and torch is a CPU build: probes see metadata only, so GPUs can be
described.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from nsa_core.contract import SLOTS, Reason, Request
from nsa_core.dispatch.loading import BackendEntry
from nsa_core.dispatch.probing import ask
from nsa_core.dispatch.registry import Registry, discover
from nsa_core.layout import BlockGeometry
from nsa_core.util.text import one_line

DEVICES: tuple[tuple[str, str, tuple[int, int] | None], ...] = (
    ("CPU", "cpu", None),
    ("sm_75", "cuda", (7, 5)),
    ("sm_80", "cuda", (8, 0)),
    ("sm_90", "cuda", (9, 0)),
    ("sm_120", "cuda", (12, 0)),
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
_HEAD = """# Who runs what

Written by `nsa_cli.support_matrix` from the answers of the probes, for machines that are described
rather than present; a test holds this page to them. A cell says which of the slots that a backend
offers it takes, gradients included ("forward": without them). What a probe finds missing on the
machine that wrote this page (a package, a driver) is left out: `nsa backends explain` tells that of
yours.

The base request is 12 query heads over 2 groups, Dk = Dv = 64, 4096 tokens, bfloat16, l=32, d=16,
l'=64, n=16, w=512; each row changes what it names. `nsa backends explain` answers for any other.
"""


def _questions() -> Iterator[tuple[str, Request]]:
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        yield dtype, dataclasses.replace(_BASE, dtype=dtype)
    yield "deterministic", dataclasses.replace(_BASE, deterministic=True)
    yield "packed documents", dataclasses.replace(_BASE, varlen=True)
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
    """The page as Markdown: a table per ready backend of ``registry``, and why its refusals are
    refusals.
    """
    parts = [_HEAD]
    for entry in registry.entries:
        title = f"## {one_line(entry.name)}\n"
        if entry.spec is None:
            parts.append(f"{title}\n{entry.status.capitalize()}: {one_line(entry.reason)}.\n")
            continue
        offered = ", ".join(slot for slot in SLOTS if slot in entry.spec.slots)
        summary = one_line(entry.spec.summary)
        parts.append(
            f"{title}\n{summary[:1].upper()}{summary[1:]}. Offers {offered}.\n\n{_table(entry)}"
        )
    return "\n".join(parts)


_Answers = dict[tuple[str, str, str], tuple[tuple[Reason, ...], tuple[Reason, ...]]]


def _answers(entry: BackendEntry) -> _Answers:
    """(question, device, slot) -> reasons with gradients and without, those given to every question
    left out.
    """
    assert entry.spec is not None  # only ready backends are asked
    found: _Answers = {}
    for label, request in _questions():
        for title, device, capability in DEVICES:
            for slot in entry.spec.slots:
                asked = dataclasses.replace(
                    request, slot=slot, device=device, capability=capability
                )
                forward = dataclasses.replace(asked, needs_grad=False)
                found[label, title, slot] = (ask(entry, asked).reasons, ask(entry, forward).reasons)
    always = set.intersection(*(set(forward) for _, forward in found.values()))
    return {
        key: (
            tuple(r for r in full if r not in always),
            tuple(r for r in forward if r not in always),
        )
        for key, (full, forward) in found.items()
    }


def _table(entry: BackendEntry) -> str:
    assert entry.spec is not None  # only ready backends have a table
    answers = _answers(entry)
    offered = [slot for slot in SLOTS if slot in entry.spec.slots]
    titles = [title for title, _, _ in DEVICES]
    lines = ["| request | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for label, _ in _questions():
        cells = [
            _cell([answers[label, title, slot] for slot in offered], offered) for title in titles
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    said: dict[str, None] = {}
    for full, _ in answers.values():
        said |= dict.fromkeys(one_line(reason) for reason in full)
    lines += (
        ["", "Reasons:", "", *(f"- {text}" for text in said)]
        if said
        else ["", "It refuses nothing above."]
    )
    return "\n".join(lines) + "\n"


def _cell(
    answers: Sequence[tuple[tuple[Reason, ...], tuple[Reason, ...]]], offered: Sequence[str]
) -> str:
    whole = [slot for slot, (full, _) in zip(offered, answers) if not full]
    forward = [slot for slot, (full, without) in zip(offered, answers) if full and not without]
    named = ["yes"] if whole == list(offered) else [", ".join(whole)] if whole else []
    named += [f"forward: {', '.join(forward)}"] if forward else []
    return "; ".join(named) or "-"


if __name__ == "__main__":
    print(support_matrix(discover(safe=True)), end="")
