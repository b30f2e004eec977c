"""Six invariants of NSA as checks that raise AssertionError, and the faults that they must find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from nsa_core import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_verify.judge.slot import judge_slot
from observed import keys_read, slot_kernel

GEOMETRY = BlockGeometry(8, 4, 16, 4, window_size=24)
LENGTHS = (5, 8, 41, 77)  # less than l, l, and two lengths with partial blocks
SHAPE = (1, 2, 2)  # B, G, h


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels under test; a fault replaces one of them."""

    cmp: Any
    select: Any
    sel: Any
    win: Any
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


def kernels_of(backend: str, device: str = "cpu", geometry: BlockGeometry = GEOMETRY) -> Kernels:
    """Return the slots of ``backend`` at scale 1; sdpa fills the slot that fa2 lacks."""
    owners = {
        slot: "sdpa" if (backend, slot) == ("fa2", "select") else backend
        for slot in ("cmp", "select", "sel")
    }
    kernels = {
        slot: slot_kernel(name, slot, geometry) for slot, name in {**owners, "win": backend}.items()
    }
    dtype = torch.float16 if (backend, device) == ("fa2", "cuda") else torch.float32
    return Kernels(**kernels, device=device, dtype=dtype)


def _read(kernels: Kernels, slot: str, length: int, *blocks: torch.Tensor) -> list[list[list[int]]]:
    """Return the keys [S][G] that ``slot`` reads in a sequence of ``length`` tokens."""
    batch, groups, heads = SHAPE
    n_keys = GEOMETRY.num_compressed(length) if slot == "cmp" else length
    kernel, shape = getattr(kernels, slot), (batch, length, groups, heads)
    return keys_read(kernel, shape, n_keys, *blocks, dtype=kernels.dtype, device=kernels.device)[0]


def _chosen(kernels: Kernels, q: torch.Tensor, k_cmp: torch.Tensor) -> torch.Tensor:
    """Return the blocks [1, S, G, n] that cmp and select of the kernels give."""
    q, k_cmp = (x.to(kernels.device, kernels.dtype) for x in (q, k_cmp))
    blocks: torch.Tensor = kernels.select(q, k_cmp, kernels.cmp(q, k_cmp, k_cmp)[1])
    return blocks.cpu()


def _random_blocks(kernels: Kernels, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    batch, groups, heads = SHAPE
    q = torch.randn(batch, length, groups * heads, 16, generator=generator)
    return _chosen(
        kernels,
        q,
        torch.randn(batch, GEOMETRY.num_compressed(length), groups, 16, generator=generator),
    )


def inv_1(kernels: Kernels) -> None:
    """Masks: cmp reads blocks that end at t or before, win the last w tokens, sel its keys <= t."""
    for length in LENGTHS:
        blocks = _random_blocks(kernels, length)
        read = {"cmp": _read(kernels, "cmp", length), "win": _read(kernels, "win", length)}
        read["sel"] = _read(kernels, "sel", length, blocks)
        for t in range(length):
            for g in range(SHAPE[1]):
                assert read["cmp"][t][g] == [i for i in range(length) if 4 * i + 7 <= t], ("cmp", t)
                assert read["win"][t][g] == [j for j in range(length) if t - 24 < j <= t], (
                    "win",
                    t,
                )
                selected = blocks[0, t, g].tolist()
                assert read["sel"][t][g] == [
                    j for j in range(length) if j // 16 in selected and j <= t
                ], ("sel", t)


def _free_blocks(kernels: Kernels, logits: dict[int, float], free: int = 1) -> list[int]:
    """Return the ``free`` blocks that the last of 208 tokens selects, given cmp ``logits``.

    Block 0 and the last two blocks are forced and not returned.
    """
    length, width = 208, 16
    k_cmp = torch.zeros(1, GEOMETRY.num_compressed(length), 1, width)
    k_cmp[..., 0] = -200.0  # p is exactly 0, so that equal scores have equal bits
    for token, logit in logits.items():
        k_cmp[0, token, 0, 0] = logit
    q = torch.zeros(1, length, 1, width)
    q[..., 0] = 1.0
    blocks = _chosen(kernels, q, k_cmp)[0, -1, 0].tolist()
    assert {0, 11, 12} <= set(blocks), blocks  # forced: the first, the previous, the current
    return sorted(set(blocks) - {0, 11, 12})[:free]


def inv_2(kernels: Kernels) -> None:
    """Eq. 9, indices: the weight of a compressed token goes to the block that contains it."""
    for block in (2, 5, 9):
        for inside in (0, 1, 2):  # block j contains the compressed tokens 4j .. 4j + 2
            assert _free_blocks(kernels, {4 * block + inside: 12.0}) == [block], (block, inside)


def inv_3(kernels: Kernels) -> None:
    """Eq. 9, weights: a token across an edge adds half the weight of one inside to each block."""
    edge, inside = 4 * 4 - 1, 4 * 7 + 1  # across the edge of blocks 3 and 4; inside block 7
    assert _free_blocks(kernels, {edge: 12.0, inside: 11.5}) == [7]  # 1 * e^12 < 2 * e^11.5
    # 1 * e^12 > 2 * e^11, and block 3 comes before block 4
    assert _free_blocks(kernels, {edge: 12.0, inside: 11.0}) == [3]


def inv_4(kernels: Kernels) -> None:
    """Guards: sizes that do not divide are refused with their names and values."""
    for construct, message in (
        (
            lambda: BlockGeometry(32, 12, 64, 16),
            "compress_stride must divide compress_block_size, got 12 and 32",
        ),
        (
            lambda: BlockGeometry(32, 32, 48, 16),
            "compress_stride must divide select_block_size, got 32 and 48",
        ),
        (
            lambda: NSAConfig(dim=52, n_heads=13, n_kv_heads=4),
            "13 query heads do not divide over 4",
        ),
    ):
        try:
            construct()
        except InvalidInput as error:
            assert message in str(error)  # noqa: PT017
        else:
            raise AssertionError(f"not refused: {message}")


def inv_5(kernels: Kernels) -> None:
    """Short sequences: with all blocks selected and S <= w, sel and win equal causal attention."""
    batch, groups, heads = SHAPE
    for length in (1, 7, 24):
        generator = torch.Generator().manual_seed(length)
        sizes = {"q": groups * heads, "k": groups, "v": groups}
        inputs = {
            n: (
                torch.randn(batch, length, h, 16, generator=generator).to(
                    kernels.device, kernels.dtype
                )
            )
            for n, h in sizes.items()
        }
        blocks = torch.arange(4, dtype=torch.int32, device=kernels.device).expand(
            batch, length, groups, -1
        )
        for o, lse in (kernels.win(*inputs.values()), kernels.sel(*inputs.values(), blocks)):
            verdicts = judge_slot("win", inputs, {"o": o, "lse": lse}, GEOMETRY, 1.0)
            assert all(v.ok for v in verdicts.values()), {n: v.why for n, v in verdicts.items()}


def inv_6(kernels: Kernels) -> None:
    """Counters: the number of keys that the last token reads in all branches.

    It is max(0, floor((S-l)/d) + 1) + |selected blocks cut at t| + min(w, S).
    """
    for length in LENGTHS:
        blocks, t = _random_blocks(kernels, length), length - 1
        for g in range(SHAPE[1]):
            selected = [j for j in blocks[0, t, g].tolist() if j >= 0]
            predicted = (
                max(0, (length - 8) // 4 + 1)
                + sum(min(16, length - 16 * j) for j in selected)
                + min(24, length)
            )
            read = [_read(kernels, slot, length) for slot in ("cmp", "win")] + [
                _read(kernels, "sel", length, blocks)
            ]
            assert sum(len(branch[t][g]) for branch in read) == predicted, (length, g)


_ALL = (inv_1, inv_2, inv_3, inv_4, inv_5, inv_6)
INVARIANTS: dict[str, Callable[[Kernels], None]] = {
    f"INV-{i}": check for i, check in enumerate(_ALL, 1)
}


def _next_token(kernel: Any) -> Any:
    """Return the row of token t + 1 for token t."""
    return lambda *x: (lambda o, lse: (o.roll(-1, 1), lse.roll(-1, 2)))(*kernel(*x))


def _unit_weights(kernels: Kernels) -> Any:
    """Return a select that adds a compressed token only to the block of its first token."""
    plain = slot_kernel("sdpa", "select", dataclasses.replace(GEOMETRY, compress_block_size=4))
    return lambda q, k, lse: plain(q, torch.nn.functional.pad(k, (0, 0, 0, 0, 0, 1)), lse)


def _first_value(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the result of the reports' reference.

    Its causal mask was aligned top-left, so that a single query saw only the first key.
    """
    heads = q.shape[2] // k.shape[2]
    o = v[:, :1].repeat_interleave(heads, 2).expand(-1, q.shape[1], -1, -1)
    return o, (q * k[:, :1].repeat_interleave(heads, 2)).sum(-1).transpose(1, 2)


FAULTS: dict[str, dict[str, Callable[[Kernels], Any]]] = {
    "INV-1": {
        "cmp": lambda k: _next_token(k.cmp),
        "win": lambda k: slot_kernel("sdpa", "win", dataclasses.replace(GEOMETRY, window_size=25)),
        "sel": lambda k: _next_token(k.sel),
    },
    "INV-2": {
        "select": lambda k: lambda q, k_cmp, lse: k.select(q, k_cmp.roll(3, 1), lse)
    },  # Eq. 9 with 0-based indices
    "INV-3": {"select": _unit_weights},
    "INV-5": {
        "win": lambda k: _first_value,
        "sel": lambda k: lambda q, k, v, blocks: _first_value(q, k, v),
    },
    "INV-6": {
        "win": lambda k: slot_kernel("sdpa", "win", dataclasses.replace(GEOMETRY, window_size=23)),
        "cmp": lambda k: _next_token(k.cmp),
    },
}
