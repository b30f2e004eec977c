"""The results of a step of a cache or of pages: the blocks, and the output given the blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from nsa_verify.checks.decode_fused import judge_composed
from nsa_verify.drawn.caches.contents import Fault, owned, read_rows
from nsa_verify.drawn.caches.history import LayerHistory
from nsa_verify.drawn.caches.replay import Called, Done, Replay
from nsa_verify.drawn.case import EXCHANGES
from nsa_verify.problems.findings import bits
from nsa_verify.problems.step_data import PackedStep

# (branch, "k" or "v", rows, sequence) -> rows of keys or values [len(rows), G, D] on the CPU
Read = Callable[[str, str, range, int], torch.Tensor]


def result_faults(
    history: LayerHistory,
    lengths: Sequence[int],
    new: Sequence[int],
    results: dict[str, torch.Tensor],
    read: Read,
) -> Iterator[Fault]:
    """Judge the blocks and the output of a step, given the keys and values that it saw.

    Args:
        history: The history.
        lengths: Length of each sequence after the step.
        new: New tokens of each sequence.
        results: q, gates, blocks and o of the new tokens [N, ...], one sequence after the other.
        read: Returns the rows that a sequence sees.
    """
    config, tensors = history.config, dict[str, torch.Tensor]()
    p = PackedStep(tensors, lengths, new)
    rest = sum(lengths) // config.compress_stride  # rows of packed k_cmp and v_cmp
    for name in ("cmp", "sel", "win"):
        count = config.geometry.num_compressed if name == "cmp" else int
        for kind in "kv":
            parts = []
            for b, length in enumerate(lengths):
                visible = owned(config, length, length - new[b])[name]
                seen = read(name, kind, visible, b)
                part = seen.new_zeros((count(length), *seen.shape[1:]))
                part[visible.start : visible.stop] = seen
                parts.append(part)
            if name == "cmp":
                parts.append(parts[0].new_zeros((rest - sum(map(len, parts)), *part.shape[1:])))
            tensors[f"{kind}_{name}"] = torch.cat(parts)
    q, gates, blocks, o = (results[name].cpu() for name in ("q", "gates", "blocks", "o"))
    tensors |= {"q": p.scatter(q), "gates": p.scatter(gates)}
    for finding in judge_composed(history.findings, p, o, blocks, EXCHANGES):
        if finding.ok is False:
            yield Fault(finding.slot, f"{finding.quantity} of a step", finding.detail)


def judge_output(replay: Replay, done: Done) -> Iterator[Fault]:
    """Yield the faults of a step of a cache: of its positions, its blocks and its output.

    Keys and values of cmp and sel come from the cache; :func:`content_faults` checks them. The ring
    of win has lost older rows, so its rows, and the queries, come from a prefill.
    """
    new, reached = done.operation.values, list(done.before)
    blocks: list[list[torch.Tensor]] = [[] for _ in new]
    last = -1
    for called in done.calls:
        for b, row, start, stop in _spans(called, done, reached, last):
            if start != reached[b]:
                yield Fault("", "lengths of a step", f"it starts at {start}, not at {reached[b]}")
                return
            blocks[b].append(called.blocks[row, : stop - start].cpu())
            reached[b], last = stop, b
    if reached != done.model.lengths:
        yield Fault("", "lengths of a step", f"{reached}, expected {done.model.lengths}")
        return
    if not any(new):
        return
    o, y = (torch.cat(pieces, 1) for pieces in zip(*done.projected))
    # A prefill may project the sequences with new tokens alone.
    active = range(len(new)) if len(o) == len(new) else [b for b, count in enumerate(new) if count]
    o, y = (torch.cat([x[i, : new[b]] for i, b in enumerate(active)]) for x in (o, y))
    if not torch.equal(bits(y), bits(torch.cat([done.y[b, :n] for b, n in enumerate(new)]))):
        yield Fault("", "y", "it differs from the rows of the output projection")
    rows = [replay.rows.of(sequence.tokens) for sequence in done.model.sequences]

    def read(name: str, kind: str, visible: range, b: int) -> torch.Tensor:
        if name == "win":
            return rows[b][f"{kind}_win"][visible.start : visible.stop].cpu()
        pages = getattr(replay.cache.kv.pages, name)
        return read_rows(getattr(pages, kind), visible, b, pages.table).cpu()

    def newest(name: str) -> torch.Tensor:
        return torch.cat([x[name][before:] for x, before in zip(rows, done.before)])

    results = {
        "q": newest("q"),
        "gates": newest("gates"),
        "blocks": torch.cat([part for parts in blocks for part in parts]),
        "o": o.unflatten(-1, (replay.history.config.n_heads, -1)),
    }
    yield from result_faults(replay.history, reached, new, results, read)


def _spans(
    called: Called, done: Done, reached: Sequence[int], last: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (sequence, row, first token, token behind the last) of the rows of a call of select.

    The call of a long chunk does not say which sequence it belongs to. Sequences come in turn, so
    it is the next one after ``last``, that of the call before, that ends where the call begins.
    """
    rows, lengths = called.q.shape[:2], done.model.lengths
    if called.call is not None:
        starts, stops = called.call.starts.tolist(), called.call.lengths.tolist()
        yield from ((b, b, *span) for b, span in enumerate(zip(starts, stops)))
    elif (start := called.first_query) is None:  # a prefill
        # A host that has upper bounds only does not know which sequences get no token.
        active = [b for b, count in enumerate(done.operation.values) if count]
        sequences = active if rows[0] == len(active) else range(rows[0])
        yield from ((b, row, 0, lengths[b]) for row, b in enumerate(sequences))
    elif rows[0] == len(reached):
        yield from ((b, b, start, start + rows[1]) for b in range(rows[0]))
    else:
        turn = sorted(range(len(reached)), key=lambda b: (b <= last, b))
        fitting = [b for b in turn if reached[b] == start and start < lengths[b]]
        yield from ((b, 0, start, start + rows[1]) for b in fitting[:1])
