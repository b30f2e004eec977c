"""The calls of a long chunk: prefill kernels on queries that begin inside their sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from nsa_verify.drawn.caches.contents import Fault, row_faults
from nsa_verify.drawn.caches.history import History
from nsa_verify.drawn.caches.layers import Rows
from nsa_verify.drawn.caches.replay import Called
from nsa_verify.drawn.case import EXCHANGES
from nsa_verify.judge.selection import judge_selection
from nsa_verify.judge.slot import judge_slot


class ChunkCall(NamedTuple):
    """One call of each slot for a chunk of one sequence, or of all sequences.

    Attributes:
        calls: The calls of cmp, select, sel and win, by slot.
        sequences: The sequences, in the order of the batch axis.
        start: First token of the chunk.
        end: Token after its last one.
    """

    calls: dict[str, Called]
    sequences: list[int]
    start: int
    end: int


def chunk_of(
    calls: dict[str, Called], lengths: Sequence[int], after: Sequence[int], last: int
) -> ChunkCall:
    """Return the chunk of these calls.

    A call of one sequence does not name it. Sequences come in turn, so it is the next one that ends
    where the call begins.

    Args:
        calls: The calls of cmp, select, sel and win, by slot.
        lengths: Length of each sequence before the chunk.
        after: Length of each sequence after the step that the chunk is part of.
        last: The sequence of the chunk before, or -1.
    """
    start, rows = calls["cmp"].first_query, calls["cmp"].tensors[0].shape[1]
    assert start is not None
    if calls["cmp"].tensors[0].shape[0] == len(lengths):
        return ChunkCall(calls, list(range(len(lengths))), start, start + rows)
    turn = sorted(range(len(lengths)), key=lambda b: (b <= last, b))
    fitting = [b for b in turn if lengths[b] == start and lengths[b] < after[b]]
    return ChunkCall(calls, fitting[:1], start, start + rows)


def chunk_faults(
    history: History, chunk: ChunkCall, rows: Sequence[Rows], fused: bool
) -> Iterator[Fault]:
    """Yield the faults of a chunk: of the rows that its calls received, and of their results.

    Args:
        history: The history. In float64 only the blocks are judged, and the caller judges the
            output.
        chunk: The calls.
        rows: The rows of a prefill of each sequence.
        fused: Whether the backend writes the rows of a step, and may round rotated rows once less.
    """
    config = history.config
    if not chunk.sequences:
        yield Fault("", "lengths of a step", f"a chunk starts at {chunk.start}, no sequence does")
        return
    for slot in ("select", "sel"):
        first = chunk.calls[slot].first_query
        if first != chunk.start:
            yield Fault(slot, "lengths of a step", f"first_query is {first}, not {chunk.start}")
            return
    sel, win = chunk.calls["sel"], chunk.calls["win"]
    assert win.first_query is not None
    oldest = chunk.start - win.first_query  # the token of the first row of k and v of win
    required = max(0, chunk.start - config.window_size + 1)
    if oldest > required:
        yield Fault("win", "keys of a step", f"they begin at token {oldest}, not at {required}")
        return
    complete = config.geometry.num_compressed(chunk.end)
    tensors = {
        "q": (sel.tensors[0], chunk.start, chunk.end),
        "k_cmp": (chunk.calls["cmp"].tensors[1], 0, complete),
        "v_cmp": (chunk.calls["cmp"].tensors[2], 0, complete),
        "k_sel": (sel.tensors[1], 0, chunk.end),
        "v_sel": (sel.tensors[2], 0, chunk.end),
        "k_win": (win.tensors[1], oldest, chunk.end),
        "v_win": (win.tensors[2], oldest, chunk.end),
    }
    for row, b in enumerate(chunk.sequences):
        for name, (tensor, first, last) in tensors.items():
            part = tensor[row, : last - first].cpu()
            yield from row_faults(config, name, part, rows[b], range(first, last), b, fused)
    yield from _result_faults(history, chunk)


def _result_faults(history: History, chunk: ChunkCall) -> Iterator[Fault]:
    """Judge the results given the tensors that the calls received."""
    sizes = (history.config.geometry, history.config.softmax_scale)
    names = {
        "cmp": ("q", "k_cmp", "v_cmp"),
        "sel": ("q", "k", "v", "blocks"),
        "win": ("q", "k", "v"),
    }
    for slot, called in chunk.calls.items():
        tensors = [x.cpu() for x in called.tensors]
        results = [x.cpu() for x in called.results]
        if slot == "select":
            q, k_cmp, lse = tensors
            choice = judge_selection(
                q=q,
                k_cmp=k_cmp,
                lse=lse,
                blocks=results[0],
                geometry=sizes[0],
                scale=sizes[1],
                first_query=called.first_query,
                exchanges=EXCHANGES,
            )
            if not choice:
                yield Fault(slot, "blocks of a step", choice.why)
        elif history.torch_dtype != torch.float64:
            inputs, outputs = dict(zip(names[slot], tensors)), dict(zip(("o", "lse"), results))
            verdicts = judge_slot(slot, inputs, outputs, *sizes, first_query=called.first_query)
            for name, verdict in verdicts.items():
                if not verdict:
                    yield Fault(slot, f"{name} of a step", verdict.why)
