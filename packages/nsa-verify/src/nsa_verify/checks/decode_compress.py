"""Check of the fused decode form compress (contract.FUSED): phi of the block of a step."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from nsa_core.dtypes import stats_dtype
from nsa_core.layer.rope import rope_table
from nsa_core.plan.plan import Plan
from nsa_verify.checks.under_test import StepUnderTest, step_check
from nsa_verify.judge.tensor import Verdict, heads_first, judge
from nsa_verify.problems.findings import Finding
from nsa_verify.problems.step_data import StepData, page_of
from nsa_verify.problems.steps import Step

_HALF_PRECISION = (torch.bfloat16, torch.float16)
_SPREAD = 4  # sequences that complete blocks spread over the longest sequence
Weights = tuple[torch.Tensor, ...]
Angles = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [N, 1, D / 2]


@step_check("decode fused compress")
def fused_compress(subject: StepUnderTest) -> Iterator[Finding]:
    """Run :func:`compress_parity` with each kind of phi, with and without rotary.

    With 16-bit keys, one run has weights in fp32, as under autocast.
    """
    plan = subject.plan()
    if "compress" not in plan.fused:
        yield subject.missing_form("compress")
        return
    subject = dataclasses.replace(subject, step=with_complete_blocks(subject.step))
    for kind, rope in itertools.product(("mlp", "linear", "mean"), (False, True)):
        yield from compress_parity(subject, plan, kind, rope=rope)
    if subject.dtype in _HALF_PRECISION:
        yield from compress_parity(subject, plan, "mlp", rope=True, weights=torch.float32)


def with_complete_blocks(step: Step) -> Step:
    """Return ``step`` with at most d rows, and with more sequences.

    One completes its first block, one has a token too few for it, one completes the last block of
    its last page, and one is as long and has no new token. Others complete blocks in between, some
    of which begin at the end of the ring and continue at its start.
    """
    geometry = step.case.config.geometry
    size, stride = geometry.compress_block_size, geometry.compress_stride
    rows = min(step.rows, stride)
    last = max(size, -(-max(step.lengths) // stride) * stride)
    number = geometry.num_compressed(last)
    blocks = [number * (i + 1) // (_SPREAD + 1) for i in range(_SPREAD)]
    generator = torch.Generator().manual_seed(step.case.seed)
    new = torch.randint(1, rows + 1, (_SPREAD,), generator=generator).tolist()
    # The end of the block is the first new token, or a later one.
    lengths = [
        min(last, i * stride + size + int(torch.randint(n, (), generator=generator)))
        for i, n in zip(blocks, new)
    ]
    return dataclasses.replace(
        step,
        lengths=(*step.lengths, size, size - 1, last, last, *lengths),
        new=(*(min(n, rows) for n in step.new), 1, min(1, size - 1), rows, 0, *new),
        rows=rows,
    )


def compress_parity(
    subject: StepUnderTest,
    plan: Plan,
    kind: str,
    *,
    rope: bool,
    weights: torch.dtype | None = None,
) -> Iterator[Finding]:
    """Judge the compressed tokens that a fused compress writes; all others must keep their bits.

    The ring holds NaN except in the tokens that the cache keeps, and the pages hold numbers.

    Args:
        subject: The combination on a step of at most d rows.
        plan: A decode plan with a fused compress.
        kind: Kind of phi, "mlp", "linear" or "mean".
        rope: Whether to rotate k_cmp.
        weights: Dtype of the weights; None: that of the keys.
    """
    step, data, dtype = subject.step, subject.data, subject.dtype
    config, device = step.case.config, data.q.device
    generator = torch.Generator().manual_seed(step.case.seed)
    num_blocks = config.geometry.num_compressed
    blocks = [  # (sequence, block) of the blocks that the step completes
        (b, i)
        for b, (length, new) in enumerate(zip(step.lengths, step.new))
        for i in range(num_blocks(length - new), num_blocks(length))
    ]
    rings = [_ring(step, data, width, generator) for width in (config.qk_dim, config.v_dim)]
    phis = [
        tuple(x.to(device, weights or dtype) for x in _weights(step, kind, width, generator))
        for width in (config.qk_dim, config.v_dim)
    ]
    stores = [
        torch.randn(data.stores[name].shape, generator=generator).to(device, dtype)
        for name in ("k_cmp", "v_cmp")
    ]
    before = [store.clone() for store in stores]
    tables, angles = None, None
    if rope:
        positions = torch.arange(max(step.lengths) + step.rows, device=device)
        table = rope_table(positions, config.qk_dim, config.frequencies, dtype)
        tables = (table.cos[:, 0], table.sin[:, 0])
        first = torch.tensor([i for _, i in blocks], device=device) * config.compress_stride
        angles = (table.cos[first], table.sin[first])
    plan.fused["compress"](*rings, *stores, *phis, rope=tables, call=data.call)
    label = f"{kind}, rotary" if rope else kind
    label += f", {str(weights).removeprefix('torch.')} weights" if weights else ""
    verdicts = {}
    for i, name in enumerate(("k_cmp", "v_cmp")):
        rows = _rows_of(step, data, blocks, stores[i].shape[1])
        x = _tokens(step, data, rings[i], blocks)
        verdicts[f"{name}, {label}"] = _judge(
            stores[i].flatten(0, 1)[rows], x, phis[i], angles if name == "k_cmp" else None, dtype
        )
        others = torch.ones(stores[i].flatten(0, 1).shape[0], dtype=torch.bool, device=device)
        others[rows] = False
        after, unchanged = (store.flatten(0, 1)[others] for store in (stores[i], before[i]))
        yield subject.same_bits("", f"other rows of {name}, {label}", after, unchanged)
    yield from subject.judged("", verdicts)


def _ring(step: Step, data: StepData, width: int, generator: torch.Generator) -> torch.Tensor:
    """Return pages [P, page, G, width] with the tokens from the first incomplete block on."""
    config = step.case.config
    spare = 3 if step.page_size else 0
    table = data.call.tables.raw.cpu()
    rows = -(-(config.compress_block_size + step.rows - 1 + spare) // table.shape[1])
    ring = torch.full((table.numel(), rows, config.n_kv_heads, width), torch.nan)
    for b, (length, new) in enumerate(zip(step.lengths, step.new)):
        first = config.geometry.num_compressed(length - new) * config.compress_stride
        tokens = torch.arange(first, max(first, length))
        x = torch.randn((len(tokens), *ring.shape[2:]), generator=generator)
        ring[page_of(table[b], tokens, rows), tokens % rows] = x
    moved: torch.Tensor = ring.to(data.q.device, data.q.dtype)
    return moved


def _weights(step: Step, kind: str, width: int, generator: torch.Generator) -> Weights:
    """Return weights whose terms all matter: position, W, b, and for an MLP those of the second."""
    if kind == "mean":
        return ()
    size = step.case.config.compress_block_size

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    hidden = 2 * width if kind == "mlp" else width
    position = torch.randn((size, width), generator=generator)
    first = (position, normal(hidden, size * width), torch.randn(hidden, generator=generator))
    if kind == "linear":
        return first
    return (*first, normal(width, hidden), torch.randn(width, generator=generator))


def _rows_of(step: Step, data: StepData, blocks: list[tuple[int, int]], page: int) -> torch.Tensor:
    """Return the rows of the complete blocks in pages that are joined."""
    table = data.call.tables.cmp.tolist()
    rows = [table[b][i // page] * page + i % page for b, i in blocks]
    return torch.tensor(rows, dtype=torch.int64, device=data.q.device)


def _tokens(
    step: Step, data: StepData, ring: torch.Tensor, blocks: list[tuple[int, int]]
) -> torch.Tensor:
    """Return the tokens [N, G, l, D] of the complete blocks."""
    config, (_, size, heads, width) = step.case.config, ring.shape
    if not blocks:
        return ring.new_empty((0, heads, config.compress_block_size, width))
    offsets = torch.arange(config.compress_block_size, device=ring.device)
    tokens = []
    for b, i in blocks:
        token = i * config.compress_stride + offsets
        tokens.append(ring[page_of(data.call.tables.raw[b], token, size), token % size])
    return torch.stack(tokens).transpose(1, 2)


def _judge(
    actual: torch.Tensor,  # [N, G, D]
    x: torch.Tensor,  # [N, G, l, D]
    weights: Weights,
    angles: Angles | None,
    dtype: torch.dtype,
) -> Verdict:
    """Judge compressed tokens.

    A kernel may round its weights, its hidden units, and a key before its rotation.
    """
    golden = _phi(x, weights, angles, torch.float64)
    rounded = golden
    if dtype != torch.float64:
        rounded = _phi(x, weights, angles, stats_dtype(dtype), dtype).to(dtype)
    magnitude = _magnitude(x, weights, angles)
    actual, golden, rounded, magnitude = map(heads_first, (actual, golden, rounded, magnitude))
    return judge(actual, golden, rounded, magnitude, dtype)


def _phi(
    x: torch.Tensor,
    weights: Weights,
    angles: Angles | None,
    kind: torch.dtype,
    rounded_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Return phi of tokens [N, G, l, D], rotated by ``angles``: [N, G, D] in dtype ``kind``."""

    def as_kind(t: torch.Tensor) -> torch.Tensor:
        return t.to(kind if rounded_to is None else rounded_to).to(kind)

    if weights:
        position, weight, bias, *down = weights
        y = (x.to(kind) + position.to(kind)).flatten(-2) @ as_kind(weight).mT + bias.to(kind)
        if down:
            y = as_kind(F.gelu(y)) @ as_kind(down[0]).mT + down[1].to(kind)
    else:
        y = x.to(kind).mean(-2)
    return y if angles is None else _rotated(as_kind(y), angles)


def _magnitude(x: torch.Tensor, weights: Weights, angles: Angles | None) -> torch.Tensor:
    """Return the sums of :func:`_phi` over absolute values.

    Those of the hidden units are multiplied by the derivative of GELU.
    """
    down = [t.double() for t in weights[3:]]
    if weights:
        position, weight, bias = (t.double() for t in weights[:3])
        size = (x.double().abs() + position.abs()).flatten(-2) @ weight.abs().mT + bias.abs()
    else:
        size = x.double().abs().mean(-2)
    if down:
        h = (x.double() + position).flatten(-2) @ weight.mT + bias
        normal = torch.special.ndtr(h)
        slope = normal + h * torch.exp(-h.square() / 2) / math.sqrt(2 * math.pi)
        size = (slope.abs() * size + (h * normal).abs()) @ down[0].abs().mT + down[1].abs()
    if angles is None:
        return size
    cos, sin = (t.double().abs() for t in angles)
    s1, s2 = size.chunk(2, -1)
    return torch.cat((s1 * cos + s2 * sin, s2 * cos + s1 * sin), -1)


def _rotated(y: torch.Tensor, angles: Angles) -> torch.Tensor:
    cos, sin = (t.to(y.dtype) for t in angles)
    y1, y2 = y.chunk(2, -1)
    return torch.cat((y1 * cos - y2 * sin, y2 * cos + y1 * sin), -1)
