"""The 52 cases of the reported selection test: 5 patterns twice, 5 edges, 36 shapes, 1 large.

The original test compared ranges with those of an older version of the same code. Here a case lists
the blocks of each token, or uses the blocks that `select` of the backend returns. The test compares
the keys that `sel` reads with these blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from nsa_core.layout import BlockGeometry
from nsa_verify import oracle
from observed import keys_read, ranges, slot_kernel

PATTERNS = ("random", "sequential", "duplicates", "gaps", "single_valid")
EDGES = ("empty", "all_minus_one", "adjacent", "repeated", "clamped")


@dataclasses.dataclass(frozen=True)
class Row01:
    """One of the 52 cases.

    Attributes:
        name: Name of the pattern, edge or shape.
        batch: Batch size.
        length: Tokens; None uses 8 selection blocks, the last one partial.
        groups: Number of kv heads.
        device: Device of a pattern, which the reports ran on both; "cpu" in other cases.
    """

    name: str
    batch: int = 2
    length: int | None = None
    groups: int = 2
    device: str = "cpu"

    def geometry(self, block: int) -> BlockGeometry:
        """Return a geometry with l' = ``block``; n is half of all blocks if large, else 4."""
        tokens = self.tokens(block)
        selected = -(-tokens // block) // 2 if self.name == "large" else 4
        return BlockGeometry(block // 2, block // 4, block, selected, 0, 1, block)

    def tokens(self, block: int) -> int:
        return 8 * block - 3 if self.length is None else self.length

    def blocks(self, block: int) -> torch.Tensor | None:
        """Return the blocks int32 [B, S, G, n] of the case; None lets the backend select."""
        tokens = self.tokens(block)
        lead, last = (self.batch, tokens, self.groups), tokens // block
        if self.name == "random":
            return torch.randint(
                0, last + 1, (*lead, 4), generator=torch.Generator().manual_seed(1)
            ).int()
        rows = {
            "sequential": [0, 1, 2, 3],
            "duplicates": [1, 1, 2, 2],
            "gaps": [0, 2, 4, 6],
            "single_valid": [3, -1, -1, -1],
            "empty": [],
            "all_minus_one": [-1, -1, -1],
            "adjacent": [4, 2, 3],  # one range, unsorted
            "repeated": [5, 5, 5, 5],
            "clamped": [last, last + 1, 2**31 - 1],  # cut at t, beyond the end, far beyond it
        }
        return (
            torch.tensor(rows[self.name], dtype=torch.int32).expand(*lead, -1)
            if self.name in rows
            else None
        )


CASES = (
    *(Row01(name, device=device) for device in ("cpu", "cuda") for name in PATTERNS),
    *(Row01(name) for name in EDGES),
    *(
        Row01("shape", b, s, g)
        for b, s, g in itertools.product((1, 2, 4), (1, 8, 16, 32), (1, 2, 4))
    ),
    Row01("large", 2, 256, 4),
)


def case_id(case: Row01) -> str:
    """Return an id such as "random-cuda", "empty", "shape-2x16x4" or "large-2x256x4"."""
    if case.length is not None:
        return f"{case.name}-{case.batch}x{case.length}x{case.groups}"
    return f"{case.name}-{case.device}" if case.name in PATTERNS else case.name


def choose(
    backend: str, case: Row01, geometry: BlockGeometry, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """Return the blocks that the backend selects for random queries, which must be the oracle's."""
    tokens, heads, width = case.tokens(geometry.select_block_size), 2, 16
    generator = torch.Generator().manual_seed(case.groups)
    n_c = geometry.num_compressed(tokens)
    q = torch.randn(case.batch, tokens, heads * case.groups, width, generator=generator).to(dtype)
    k_cmp = torch.randn(case.batch, n_c, case.groups, width, generator=generator).to(dtype)
    truth = oracle.cmp(q, k_cmp, k_cmp, geometry, 0.25)
    assert truth.lse is not None
    lse = truth.lse.to(torch.float64 if dtype == torch.float64 else torch.float32)
    inputs = [x.to(device) for x in (q, k_cmp, lse)]
    blocks: torch.Tensor = slot_kernel(backend, "select", geometry, 0.25)(*inputs)
    assert torch.equal(blocks.cpu(), oracle.select(q, k_cmp, truth.lse, geometry, 0.25))
    return blocks


def check(
    selector: str,
    backend: str,
    case: Row01,
    block: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    fault: Callable[[Any], Any] = lambda kernel: kernel,
) -> None:
    """Check that `sel` reads the keys <= t in the union of the blocks, each of them once.

    As ranges, the keys are disjoint and ascending.

    Args:
        selector: Backend that selects blocks if the case has none.
        backend: Backend whose `sel` is checked.
        case: The case.
        block: Selection block size.
        dtype: Dtype of q, k and v.
        device: Device of the tensors.
        fault: Wraps the kernel to plant a fault.
    """
    geometry, tokens = case.geometry(block), case.tokens(block)
    listed = case.blocks(block)
    blocks = choose(selector, case, geometry, torch.float32, device) if listed is None else listed
    read = keys_read(
        fault(slot_kernel(backend, "sel", geometry)),
        (case.batch, tokens, case.groups, 2),
        tokens,
        blocks,
        dtype=dtype,
        device=device,
    )
    block_lists = blocks.tolist()
    for b, t, g in itertools.product(range(case.batch), range(tokens), range(case.groups)):
        distinct = {j for j in block_lists[b][t][g] if j >= 0}
        keys = sorted(
            key
            for j in distinct
            if j * block <= t
            for key in range(j * block, min((j + 1) * block, t + 1))
        )
        assert read[b][t][g] == keys, (case_id(case), b, t, g)
        spans = ranges(read[b][t][g])
        assert all(0 <= start < end <= t + 1 for start, end in spans)
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans))
