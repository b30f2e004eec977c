"""Check nsa_decode: random histories of an owner of pages, who shares, moves and frees them.

Before each call every row that no sequence owns is NaN. After it every row of a sequence equals
that of a prefill, every other row is still NaN, and the output is judged by the oracle, given the
selected blocks, which are judged too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any
from unittest import mock

import torch

from nsa_core.decode import api, chunks, run
from nsa_core.decode.pages import LayerPages
from nsa_core.errors import InvalidInput, NSAError, Unsupported
from nsa_core.layer.gating import compute_gates
from nsa_core.plan.plan import Plan
from nsa_verify.drawn.caches import layers
from nsa_verify.drawn.caches.contents import Fault, owned, row_faults
from nsa_verify.drawn.caches.history import Operation, PoolHistory
from nsa_verify.drawn.caches.judge import planned
from nsa_verify.drawn.caches.model import Model
from nsa_verify.drawn.caches.outputs import result_faults
from nsa_verify.drawn.caches.pools import Pool
from nsa_verify.drawn.caches.replay import Called, recorded
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding

Plans = tuple[Plan, Plan | None, str]


def pool_findings(combination: Combination, history: PoolHistory) -> list[Finding]:
    """Run a history of a layer of the combination; return its first fault, or that it passed.

    Raises:
        Unsupported: The combination does not take the layer.
    """
    owner = _Owner(history, *planned(combination, history, _plans))
    for operation in history.operations:
        for fault in owner.faults_of(operation):
            detail = f"after {operation}: {fault.detail}"
            return [history.findings.finding(fault.slot, fault.quantity, False, detail=detail)]
    return [history.findings.finding("", "history", True)]


def _plans(plan: Callable[..., Plan], history: PoolHistory, device: str) -> Plans:
    """Return the plan of steps, that of chunks or None, and the device."""
    layer, options = (history.config, history.torch_dtype), {"page_size": history.page_size}
    partial = None
    if history.chunks:
        with suppress(Unsupported):
            partial = plan(*layer, needs_grad=False, partial=True)
    decode = plan(*layer, needs_grad=False, phase="decode", kv_dtype=history.kv_dtype, **options)
    return decode, partial, device


class _Owner:
    """A layer, its pools, and the sequences that they must hold."""

    def __init__(self, history: PoolHistory, plan: Plan, partial: Plan | None, device: str) -> None:
        self._history, self._device, rng = history, device, random.Random(history.seed)
        self._calls: list[Called] = []
        self._plan = recorded(plan, self._calls)
        self._partial = None if partial is None else recorded(partial, self._calls)
        self._fused = "append" in plan.fused
        self._attn = layers.exact_layer(history, device, plan, None)
        self._model, self._rows = Model(history), layers.Projections(self._attn)
        config, most = history.config, history.max_len
        new = max([1, *(max(x.values) for x in history.operations if x.kind == "step")])
        spare = new - 1 + history.max_rollback
        newest = (config.window_size + spare, config.compress_block_size + spare)
        win, raw = newest if history.newest == "ring" else (most, most)
        sizes = {
            "cmp": (history.cmp_page, config.geometry.num_compressed(most)),
            "sel": (history.page_size, most),
            "win": (history.newest_page, win),
            "raw": (history.newest_page, raw),
        }
        self._pools = {
            name: Pool(history, *size, device, rng, name != "raw") for name, size in sizes.items()
        }

    def faults_of(self, operation: Operation) -> Iterator[Fault]:
        """Run an operation, and yield its faults; one that the model refuses is left out."""
        model, pools, values = self._model, self._pools.values(), operation.values
        if not model.exists(operation) or model.refused(operation):
            return
        if operation.kind == "step":
            yield from self._step(operation)
            return
        model.apply(operation)
        for pool in pools:
            if operation.kind == "fork":
                pool.fork(*values)
            elif operation.kind == "move":
                pool.move(values[0])
        self._trim()

    def _live(self) -> dict[str, list[range]]:
        """Return the rows of each sequence, by branch, that a step or a crop may need."""
        spans = self._model.spans
        each = [owned(self._history.config, length, least) for least, length in spans]
        return {name: [rows[name] for rows in each] for name in self._pools}

    def _trim(self) -> None:
        """Free the pages, and erase the rows, that no sequence needs."""
        for name, live in self._live().items():
            for b, rows in enumerate(live):
                self._pools[name].keep(b, rows)
            self._pools[name].erase(live)

    def _step(self, operation: Operation) -> Iterator[Fault]:
        history, attn, model, new = self._history, self._attn, self._model, operation.values
        before = model.lengths
        for name, (old, grown) in self._written(before, new).items():
            for b in range(history.batch):
                self._pools[name].own(b, range(old[b], grown[b]))
        x = self._input(new, operation.padding)
        first = {name: [rows.start for rows in live] for name, live in self._live().items()}
        model.apply(operation)
        lengths, ends = (torch.tensor(n) for n in (model.lengths, [0, *new]))
        cu_seqlens = ends.cumsum(0).int().to(self._device)
        pages = LayerPages(**{name: pool.paged() for name, pool in self._pools.items()})
        self._calls.clear()
        try:
            with torch.no_grad(), self._short_chunks():
                gates = compute_gates(attn.gate, x)
                q, k, v = attn.heads(x)
                on_device = cu_seqlens, lengths.int().to(self._device)
                on_host = (cu_seqlens, lengths) if history.chunks else None
                rows = api.decode_rows(*on_device, len(x), on_host)
                o = api.nsa_decode(
                    q,
                    k,
                    v,
                    gates,
                    pages,
                    rows,
                    config=history.config,
                    phi=(attn.phi_k, attn.phi_v),
                    rope=api.rope_angles(
                        history.config,
                        history.max_len,
                        dtype=history.torch_dtype,
                        device=self._device,
                    ),
                    max_len=history.max_len,
                    plan=self._plan,
                )
        except InvalidInput as error:
            yield Fault("", "refused", f"a valid call was refused: {error}")
            return
        except (NSAError, RuntimeError, LookupError) as error:
            yield Fault("", "run", f"raised {type(error).__name__}: {error}")
            return
        if bool((o[sum(new) :] != 0).any()):
            yield Fault("", "o of padding", "not 0")
        yield from self._content_faults(pages, first)
        if self._calls:
            yield from self._output_faults(new, pages, o, gates)
        self._trim()

    def _short_chunks(self) -> ExitStack:
        """Let a few tokens of a sequence run the prefill kernels, and record their calls."""
        patches = ExitStack()
        patches.enter_context(mock.patch.object(run, "partial_plan", return_value=self._partial))
        limits: dict[str, Any] = {"MIN_ROWS": {"cpu": 3, "cuda": 3}, "MAX_CHUNK_ROWS": 8}
        patches.enter_context(mock.patch.multiple(chunks, **limits))
        return patches

    def _written(
        self, before: Sequence[int], new: Sequence[int]
    ) -> dict[str, tuple[list[int], list[int]]]:
        """Return the first row that a step writes and one past the last, by branch."""
        grown = [a + b for a, b in zip(before, new)]
        count = self._history.config.geometry.num_compressed
        tokens = (list(before), grown)
        compressed = ([*map(count, before)], [*map(count, grown)])
        return {"cmp": compressed, "sel": tokens, "win": tokens, "raw": tokens}

    def _input(self, new: Sequence[int], padding: int) -> torch.Tensor:
        """Return the next tokens of all sequences [T, dim]; the padding is NaN."""
        parts = [
            layers.inputs(tokens, self._attn) for tokens in self._model.next_tokens(tuple(new))
        ]
        nan = torch.full((padding, self._history.config.dim), torch.nan)
        return torch.cat([*parts, nan.to(parts[0])])

    def _content_faults(
        self, pages: LayerPages, first: Mapping[str, Sequence[int]]
    ) -> Iterator[Fault]:
        """Compare the rows of the sequences with those of a prefill, and the others with NaN.

        Args:
            pages: The pages of the step.
            first: The first row of each sequence that was not NaN before the step, by branch.
        """
        config, sequences = self._history.config, self._model.sequences
        for name, live in self._live().items():
            pool, part = self._pools[name], getattr(pages, name)
            ends = [rows.stop for rows in live]
            unused = pool.unused([range(*x) for x in zip(first[name], ends)])
            for kind in "kv":
                for b, rows in enumerate(live):
                    actual = pool.read(kind, rows, b, part.table)
                    expected, key = dict(self._rows.of(sequences[b].tokens)), f"{kind}_{name}"
                    if pool.scales is not None:
                        x = expected[key]
                        right, bound = pool.rounded(kind, x, rows, b, part.table)
                        if self._fused:  # a rotated row may be rounded once less
                            near = (actual - x[rows.start : rows.stop].cpu()).abs() <= bound
                            right = right.where(~near, actual)
                        expected[key] = torch.cat([x[: rows.start].cpu(), right])
                    yield from row_faults(config, key, actual, expected, rows, b, self._fused)
                if not pool.is_erased(kind, unused):
                    yield Fault("", f"{kind}_{name}", "a row was written that nobody owns")

    def _output_faults(
        self, new: Sequence[int], pages: LayerPages, o: torch.Tensor, gates: torch.Tensor
    ) -> Iterator[Fault]:
        """Judge the output of a step, and the blocks that it selected."""
        count = sum(new)
        results = {
            "q": torch.cat([x.q.flatten(0, 1) for x in self._calls])[:count],  # in order
            "gates": gates[:count],
            "blocks": torch.cat([x.blocks.flatten(0, 1) for x in self._calls])[:count],
            "o": o[:count],
        }

        def read(name: str, kind: str, rows: range, b: int) -> torch.Tensor:
            return self._pools[name].read(kind, rows, b, getattr(pages, name).table)

        yield from result_faults(self._history, self._model.lengths, new, results, read)
