"""The tensors of a case: values, blocks and memory layouts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch

from nsa_core.dtypes import stats_dtype
from nsa_verify.drawn.case import SlotCase
from nsa_verify.problems.step_data import column_of_table
from nsa_verify.reference import attention

# Largest |score| of each level of SlotCase.scores. From 16 on the noise of the verdict has a
# term for the rounding of scores; at scores of 8 to 16, a correct fp32 kernel can exceed a limit.
LARGE_SCORE = 300.0
OUTLIER = 16.0
SMALL = 2.0**-8
SUBNORMAL = 2.0**-17  # most numbers of this size are subnormal in fp16
STEEP = 2.0**9  # size of the gradient of o that makes dv large in fp16
_LARGEST_SCORE = {"normal": 4.0, "tiny": 1e-2, "large": LARGE_SCORE}
_FAR = (2**30, -(2**30), 2**31 - 1, -(2**31))


@dataclasses.dataclass(frozen=True)
class Problem:
    """The tensors of one slot call.

    Attributes:
        inputs: Input tensors by their names in the contract, in the order of the slot.
        do: Gradient of o; None for select.
        cu_seqlens: Document bounds; None if dense.
        max_seqlen: Length of the longest document.
        first_query: Position of row 0 of q; None if q holds whole sequences.
    """

    inputs: dict[str, torch.Tensor]
    do: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    max_seqlen: int
    first_query: int | None = None

    @property
    def placement(self) -> dict[str, Any]:
        """The arguments of the oracle and the judges that place the rows."""
        return {"cu_seqlens": self.cu_seqlens, "first_query": self.first_query}


def problem_of(case: SlotCase, device: str = "cpu") -> Problem:
    """Create the tensors of ``case``; the values do not depend on ``device``."""
    source = _Source(case)
    bounds = [0, *itertools.accumulate(case.documents)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32) if case.packed else None
    inputs, do = source.inputs(cu_seqlens)
    for name, tensor in inputs.items():
        if (name == "blocks" and case.layout == "transposed") or name not in ("lse", "blocks"):
            inputs[name] = laid_out(tensor, case.layout, name)
    if do is not None:
        do = laid_out(do, case.do_layout, "do")
    if case.first_query is not None and case.layout == "plain":
        inputs["q"], do = _inside(inputs["q"]), None if do is None else _inside(do)
    if case.metadata == "strided":
        cu_seqlens = None if cu_seqlens is None else column_of_table(cu_seqlens)
        if "blocks" in inputs:
            inputs["blocks"] = column_of_table(inputs["blocks"])
    if device != "cpu":
        inputs = {name: _moved(tensor, device) for name, tensor in inputs.items()}
        do = None if do is None else _moved(do, device)
        cu_seqlens = None if cu_seqlens is None else _moved(cu_seqlens, device)
    return Problem(inputs, do, cu_seqlens, max(case.lengths, default=0), case.first_query)


def _inside(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` [.., rows, heads, D] as a view of one with NaN before and after it."""
    rows = tensor.shape[-3]
    longer = tensor.new_full((*tensor.shape[:-3], rows + 2, *tensor.shape[-2:]), torch.nan)
    return longer.narrow(-3, 1, rows).copy_(tensor)


class _Source:
    """Random tensors of one case, drawn in a fixed order."""

    def __init__(self, case: SlotCase) -> None:
        self._case = case
        self._config = case.config
        self._dtype: torch.dtype = getattr(torch, case.dtype)
        self._generator = torch.Generator().manual_seed(case.seed)

    def inputs(
        self, cu_seqlens: torch.Tensor | None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """Return the inputs of the slot and the gradient of o."""
        case, heads = self._case, self._config.n_heads
        first, end = case.query_rows
        tokens = end - first  # rows of the queries; the keys have those of the whole axis
        if case.kind == "core":
            return self._core(tokens, cu_seqlens)
        if case.kind == "combine":
            outputs = {
                f"o_{branch}": self._values(tokens, heads) for branch in ("cmp", "sel", "win")
            }
            if case.poison != "none" and outputs["o_win"].numel():
                nonfinite = math.nan if case.poison.startswith("nan") else math.inf
                outputs["o_win"].view(-1)[outputs["o_win"].numel() // 3] = nonfinite
            return {"gates": self._gates(tokens, heads), **outputs}, self._gradient(tokens)
        geometry, compressed = self._config.geometry, case.kind in ("cmp", "select")
        count = geometry.max_compressed if case.packed else geometry.num_compressed
        rows = count(case.axis) if compressed else case.axis
        q, k = self._queries_and_keys(tokens, rows)
        suffix = "_cmp" if compressed else ""
        inputs = {"q": q, f"k{suffix}": k}
        if case.kind == "select":
            inputs["lse"] = self._lse(q, k, cu_seqlens)
            return inputs, None
        inputs[f"v{suffix}"] = self._values(rows, case.groups)
        if case.kernel == "sel":
            inputs["blocks"] = self._blocks()
        return inputs, self._gradient(tokens)

    def _core(
        self, tokens: int, cu_seqlens: torch.Tensor | None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the inputs of the core, without blocks if they are selected, and do."""
        case, geometry = self._case, self._config.geometry
        count = geometry.max_compressed if case.packed else geometry.num_compressed
        rows = {"cmp": count(tokens), "sel": tokens, "win": tokens}
        q, k = self._queries_and_keys(tokens, sum(rows.values()))
        inputs = {"q": q}
        for branch, keys in zip(rows, k.split(list(rows.values()), -3)):
            inputs[f"k_{branch}"] = keys.contiguous()
            inputs[f"v_{branch}"] = self._values(rows[branch], case.groups)
        inputs["gates"] = self._gates(tokens, self._config.n_heads)
        if case.blocks != "selected":
            inputs["blocks"] = self._blocks()
        return inputs, self._gradient(tokens)

    def _lead(self, rows: int) -> tuple[int, ...]:
        return (rows,) if self._case.packed else (self._case.batch, rows)

    def _normal(self, rows: int, *axes: int) -> torch.Tensor:
        shape = (*self._lead(rows), *axes)
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def _values(self, rows: int, heads: int) -> torch.Tensor:
        values = self._normal(rows, heads, self._case.dv)
        combine = self._case.kind == "combine"
        if self._case.values == "small":
            values = values * (SUBNORMAL if combine else SMALL)
        elif self._case.values == "outlier" and values.numel():
            # In combine one element would decide the bias of its row, so the whole row is larger.
            one = values[..., rows // 2, :, :] if combine else values.view(-1)[values.numel() // 2]
            one.copy_(one * OUTLIER if combine else torch.tensor(OUTLIER))
        return values.to(self._dtype)

    def _gradient(self, tokens: int) -> torch.Tensor:
        do = self._normal(tokens, self._config.n_heads, self._case.dv)
        if self._case.values == "small" and self._case.kind == "combine":
            do = do * SUBNORMAL
        # dk must fit fp16: large queries, or queries that no score limits, would make it too large.
        if self._case.values == "steep" and self._case.scores not in ("large", "zero"):
            do = do * STEEP
        return do.to(self._dtype)

    def _queries_and_keys(self, tokens: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k whose largest |score| is that of the case."""
        case = self._case
        q = self._normal(tokens, self._config.n_heads, case.dk)
        k = self._normal(rows, case.groups, case.dk)
        if case.layout == "expanded":  # queries and keys of the call are copies of the first
            k = laid_out(k, "expanded", "k")
        if case.scores == "zero":
            return q.to(self._dtype), torch.zeros_like(k).to(self._dtype)
        grouped = q.unflatten(-2, (case.groups, case.h))
        spec = "sghd,tgd->sght" if case.packed else "bsghd,btgd->bsght"
        scores = torch.einsum(spec, grouped, k) * abs(self._config.softmax_scale)
        if scores.numel() and float(scores.abs().max()) > 0:
            q = q * (_LARGEST_SCORE[case.scores] / float(scores.abs().max()))
        if case.scores == "tiny":  # one query is exactly 0
            q[..., tokens // 2 : tokens // 2 + 1, :, :] = 0
        # A factor that fp16 cannot hold would make the case wrong, not the kernel.
        return q.clamp(-1e4, 1e4).to(self._dtype), k.to(self._dtype)

    def _lse(
        self, q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> torch.Tensor:
        sizes = (self._config.geometry, self._config.softmax_scale)
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "first_query": self._case.first_query}
        reference = attention.cmp(q, k, k[..., :1], *sizes, **options)
        assert reference.lse is not None  # cmp has one
        return reference.lse.to(stats_dtype(self._dtype)).contiguous()

    def _gates(self, tokens: int, heads: int) -> torch.Tensor:
        gates = torch.sigmoid(self._normal(tokens, heads, 3))
        gates = {
            "sigmoid": gates,
            "negative": -gates,
            "above1": 1 + 3 * gates,
            "zero": torch.zeros_like(gates),
        }[self._case.gates]
        return gates.to(stats_dtype(self._dtype))

    def _blocks(self) -> torch.Tensor:
        """Return blocks [.., G, n] of the kind that the case names, for each row of q."""
        case = self._case
        kinds = {"64": torch.int64, "16": torch.int16, "y8": torch.uint8}
        kind = kinds.get(case.blocks[-2:], torch.int32)
        size = self._config.geometry.select_block_size
        lists = [
            self._block_lists(range(position, position + end - begin), length, size)
            for (begin, end, position), length in zip(case.query_spans, case.lengths)
        ]
        shape = (*self._lead(case.query_rows[1] - case.query_rows[0]), case.groups, case.n)
        blocks = torch.cat(lists) if lists else torch.empty(0)
        return blocks.to(kind).view(shape)

    def _block_lists(self, positions: range, length: int, size: int) -> torch.Tensor:
        """Return the blocks [rows, G, n] of tokens at ``positions`` of a document, in int64."""
        case = self._case
        candidates = (torch.tensor(positions) // size + 1)[:, None, None]
        shape = (len(positions), case.groups, case.n)
        if case.blocks == "none" or not positions:
            return torch.full(shape, -1)
        count = -(-length // size)
        keys = torch.rand((*shape[:2], count), generator=self._generator)
        # The candidates of each token in random order, then the blocks after its own.
        order = (keys + (torch.arange(count) >= candidates)).argsort(-1)[..., : case.n]
        order = torch.nn.functional.pad(order, (0, case.n - order.shape[-1]), value=count)
        if case.blocks.startswith("sorted"):
            order = torch.where(order < candidates, order, count).sort(-1).values
            return torch.where(order < count, order, -1)
        return self._messy(order, count)

    def _messy(self, order: torch.Tensor, count: int) -> torch.Tensor:
        """Return the blocks out of order, with duplicates, -1, future and far entries.

        Where blocks are an argument of the user, two lists of five are empty: one of them all, the
        other in its first half.
        """
        far = {
            "messy": [-1, *_FAR],
            # The low bits of some are valid blocks.
            "messy64": [-1, *_FAR, 2**32, 2**32 + count - 1, 2**62, -(2**32)],
            "messy16": [-1, -(2**15), 2**15 - 1],
            "messy8": [255, 254],
        }[self._case.blocks]
        blocks, entries = order.flip(-1).clone(), order.shape[-1]
        if entries > 1:
            blocks[..., 0] = blocks[..., -1]
        for index in range(1, entries - 1, 2):  # every second entry is not a block
            picks = torch.randint(len(far), blocks.shape[:-1], generator=self._generator)
            blocks[..., index] = torch.tensor(far)[picks]
        if self._case.kind != "sel":
            blocks[3::5, :, : entries // 2] = far[-1]
            blocks[1::5] = far[-1]
        return blocks


def laid_out(tensor: torch.Tensor, layout: str, name: str) -> torch.Tensor:
    """Return the values of ``tensor`` in the memory layout that is named.

    Args:
        tensor: A contiguous tensor [.., rows, heads, D].
        layout: One of LAYOUTS. "expanded" repeats a slice with stride 0, which changes the values:
            of k and v the first batch entry, or the first kv head of packed tensors; of do the
            first head. (Equal elements in a row would correlate its errors, and the bias rule takes
            them as independent.) Other tensors stay plain.
        name: Name of the tensor.
    """
    if layout == "transposed":  # storage [.., heads, rows, D]
        return tensor.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "gaps":  # NaN between the rows
        storage = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), torch.nan)
        return storage[..., : tensor.shape[-1]].copy_(tensor)
    if layout == "offset":  # one element off alignment
        return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
    if layout == "strided":  # the last axis has a stride above 1
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded":
        if name == "do":
            return tensor[..., :1, :].expand_as(tensor)
        if name[0] in "kv":
            one = tensor[:1] if tensor.dim() == 4 else tensor[:, :1]
            return one.expand_as(tensor)
    return tensor


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Copy a tensor to ``device`` with its strides and its offset."""
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    size = 1 + extent if tensor.numel() else 0
    offset = tensor.storage_offset()
    flat = torch.as_strided(tensor, (offset + size,), (1,), 0).to(device)
    return flat.as_strided(tensor.shape, tensor.stride(), offset)
