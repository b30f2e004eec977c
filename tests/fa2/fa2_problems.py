"""Problems for the slots of fa2, and functions that run and judge them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from nsa_backend_fa2.plugin import nsa_register_backends
from nsa_core.layout import BlockGeometry
from nsa_core.torch_ops.kernel import Kernel
from nsa_core.torch_ops.slot_op import slot_op
from slot_results import assert_slot_correct, results_of

SMALL = BlockGeometry(8, 4, 8, 4, 1, 2, 5)
SLOTS = ("cmp", "sel", "win")
INPUTS = {"cmp": ("q", "k_cmp", "v_cmp"), "sel": ("q", "k", "v", "blocks"), "win": ("q", "k", "v")}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Shapes and options of a slot call."""

    lengths: tuple[int, ...] = (23,)  # of the packed documents, or one length for a batch
    batch: int | None = 2  # None: packed
    heads: int = 4
    groups: int = 2
    Dk: int = 8
    Dv: int = 8
    scale: float | None = None
    geometry: BlockGeometry = SMALL
    seed: int = 0

    def inputs(
        self, slot: str, dtype: torch.dtype, device: str = "cpu"
    ) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
        """Return the inputs of the slot by name, do, and cu_seqlens."""
        generator = torch.Generator().manual_seed(self.seed)
        total = sum(self.lengths)
        lead = (total,) if self.batch is None else (self.batch, total)
        rows = (
            self.geometry.max_compressed(total)
            if self.batch is None
            else self.geometry.num_compressed(total)
        )
        keys = (*lead[:-1], rows) if slot == "cmp" else lead

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        q, do = randn(*lead, self.heads, self.Dk), randn(*lead, self.heads, self.Dv)
        k, v = randn(*keys, self.groups, self.Dk), randn(*keys, self.groups, self.Dv)
        tensors = dict(zip(INPUTS[slot], (q, k, v)))
        if slot == "sel":
            tensors["blocks"] = self.blocks(generator).to(device)
        if self.batch is not None:
            return tensors, do, None
        return tensors, do, torch.tensor([0, *self.lengths]).cumsum(0).to(device, torch.int32)

    def blocks(self, generator: torch.Generator) -> Tensor:
        """Return unsorted blocks with duplicates, future blocks, -1 and out-of-range indices.

        Token 1 has no block.
        """
        total = sum(self.lengths)
        lead = (total,) if self.batch is None else (self.batch, total)
        shape = (*lead, self.groups, self.geometry.num_selected_blocks)
        count = self.geometry.num_select_blocks(max(self.lengths))
        blocks = torch.randint(-1, count + 2, shape, generator=generator)
        blocks[..., 0, :, :] = 0
        if total > 1:
            blocks[..., 1, :, :] = -1
        if total > 2:
            blocks[..., 2, :, 0] = 2**31 - 1
        return blocks.int()

    @property
    def factor(self) -> float:
        """The scale of the scores."""
        return self.Dk**-0.5 if self.scale is None else self.scale


def kernel(
    slot: str, problem: Problem, deterministic: bool = False, partial: bool = False
) -> Kernel:
    """Return the operator of fa2 for ``slot`` with the problem's constants bound."""
    spec = nsa_register_backends().slots[slot]
    geometry = tuple(problem.geometry.as_ints())
    op = slot_op("fa2", slot, spec).op
    return Kernel("fa2", slot, op, problem.factor, geometry, deterministic, partial)


def run(
    slot: str,
    problem: Problem,
    inputs: dict[str, Tensor],
    do: Tensor,
    cu: Tensor | None,
    deterministic: bool = False,
) -> dict[str, Tensor]:
    """Return o, lse and the gradients, computed through the operator and autograd of nsa_core."""
    longest = max(problem.lengths) if cu is not None else None
    call = kernel(slot, problem, deterministic)
    return results_of(call, inputs, do, cu_seqlens=cu, max_seqlen=longest)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Queries inside the sequences of a problem.

    Attributes:
        problem: the whole sequences.
        first: position of the first query on the axis of the keys.
        stop: end of the queries.
        spare: rows of k, or of k_cmp, behind those that the contract requires; None: as many as the
            whole sequences have. Packed calls always have as many.
    """

    problem: Problem
    first: int
    stop: int
    spare: int | None = None

    def inputs(self, slot: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the piece's inputs of the inputs of the whole sequences."""
        piece = {
            n: x[..., self.first : self.stop, :, :] if n in ("q", "blocks") else x
            for n, x in inputs.items()
        }
        if self.problem.batch is None or self.spare is None:
            return piece
        compressed = slot == "cmp"
        needed = self.problem.geometry.num_compressed(self.stop) if compressed else self.stop
        rows = needed + self.spare
        return {n: x if n in ("q", "blocks") else x[:, :rows] for n, x in piece.items()}

    def run(
        self,
        slot: str,
        inputs: dict[str, Tensor],
        do: Tensor,
        cu: Tensor | None,
        deterministic: bool = False,
    ) -> dict[str, Tensor]:
        """Return o, lse and the gradients of the piece.

        Args:
            slot: the slot.
            inputs: inputs of the whole sequences.
            do: gradient of o of the whole sequences; only the piece's rows are used.
            cu: cu_seqlens.
            deterministic: as in :func:`run`.
        """
        return results_of(
            kernel(slot, self.problem, deterministic, partial=True),
            self.inputs(slot, inputs),
            do[..., self.first : self.stop, :, :],
            cu_seqlens=cu,
            max_seqlen=max(self.problem.lengths) if cu is not None else None,
            first_query=self.first,
        )

    def in_whole(self, outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``outputs`` of :meth:`run` in tensors of the whole sequences, 0 elsewhere."""
        total, first, whole = sum(self.problem.lengths), self.first, {}
        for name, x in outputs.items():
            axis = x.dim() - (1 if name == "lse" else 3)
            rows = total if name in ("o", "lse", "dq") else inputs[name[1:]].shape[axis]
            shape = [*x.shape[:axis], rows, *x.shape[axis + 1 :]]
            start = first if name in ("o", "lse", "dq") else 0
            whole[name] = x.new_zeros(shape)
            whole[name].narrow(axis, start, x.shape[axis]).copy_(x)
        return whole

    def outside(self, do: Tensor) -> Tensor:
        """Return ``do`` with zeros in the rows outside of the piece."""
        inside = torch.zeros_like(do)
        rows = slice(self.first, self.stop)
        inside[..., rows, :, :] = do[..., rows, :, :]
        return inside


def assert_judged(
    slot: str,
    problem: Problem,
    dtype: torch.dtype,
    device: str = "cpu",
    deterministic: bool = False,
) -> dict[str, Tensor]:
    """Run the problem, compare all outputs with the oracle, and return them."""
    inputs, do, cu = problem.inputs(slot, dtype, device)
    outputs = run(slot, problem, inputs, do, cu, deterministic)
    assert_correct(slot, problem, inputs, outputs, do, cu)
    return outputs


def assert_correct(
    slot: str,
    problem: Problem,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    do: Tensor,
    cu: Tensor | None,
    **options: Any,
) -> None:
    """Compare outputs with the oracle."""
    sizes = (problem.geometry, problem.factor)
    assert_slot_correct(slot, inputs, outputs, *sizes, cu_seqlens=cu, do=do, **options)


# Empty documents first, in the middle and last; documents shorter than l, and of exactly l tokens.
PACKED = (0, 17, 1, 0, 7, 8, 0)
WIDE = BlockGeometry(32, 8, 64, 2, 1, 1, 100)

PROBLEMS = {
    "plain": Problem(),
    "row12-h1": Problem(heads=2, groups=2),
    "row12-h3": Problem(heads=3, groups=1, batch=1),
    "row12-h6": Problem(heads=12, groups=2, batch=1),
    "row13-odd-width": Problem(Dk=5, Dv=5),
    "row14-narrow-v": Problem(Dk=24, Dv=16, batch=1),
    "row14-wide-v": Problem(Dk=6, Dv=13),
    "row03-one-token": Problem((1,)),
    "row04-shorter-than-l": Problem((7,)),
    "row05-l": Problem((8,)),
    "row05-l+d-1": Problem((11,)),
    "row05-l+d": Problem((12,)),
    "row06-odd": Problem((25,), batch=3, heads=2, groups=1),
    "row07-n-covers-all": Problem((20,)),
    "row10-wide-window": Problem((18,), batch=1, geometry=BlockGeometry(8, 4, 8, 4, 1, 2, 100)),
    "row10-window-is-s": Problem((18,), batch=1, geometry=BlockGeometry(8, 4, 8, 4, 1, 2, 18)),
    "window-1": Problem((18,), batch=1, geometry=BlockGeometry(8, 4, 8, 4, 1, 2, 1)),
    "l-is-d": Problem((18,), batch=1, geometry=BlockGeometry(4, 4, 8, 4, 1, 2, 7)),
    "long-blocks": Problem((130,), batch=1, heads=2, groups=1, geometry=WIDE),
    "row41-negative-scale": Problem(scale=-0.3),
    "row41-zero-scale": Problem(scale=0.0),
    "packed": Problem((9, 14), batch=None),
    "row18-packed-empties": Problem(PACKED, batch=None),
    "packed-all-short": Problem((7, 3, 7), batch=None),
    "packed-one": Problem((33,), batch=None),
    "packed-one-run-each": Problem((8, 9, 3), batch=None),
    "packed-single-tokens": Problem((1, 0, 1), batch=None),
    "packed-padded-widths": Problem(PACKED, batch=None, heads=3, groups=1, Dk=5, Dv=9),
    "packed-negative-scale": Problem(PACKED, batch=None, scale=-0.3),
}
TINY = {
    "batch": Problem(Dk=64, Dv=64),
    "one": Problem(batch=1, Dk=64, Dv=64),
    "packed": Problem(PACKED, batch=None, Dk=64, Dv=64),
}


def assert_compiled_correct(
    slot: str, problem: Problem, dtype: torch.dtype, device: str, backend: str
) -> None:
    """Compile a function that calls the operator as one graph, and compare it with the oracle."""
    # Each call recompiles the function below, and dynamo allows eight recompilations.
    torch._dynamo.reset()
    inputs, do, cu = problem.inputs(slot, dtype, device)
    call, longest = kernel(slot, problem), max(problem.lengths) if cu is not None else None

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        o, lse = call(*tensors, **options)
        return o * 1, lse

    compiled.slot = slot
    outputs = results_of(compiled, inputs, do, cu_seqlens=cu, max_seqlen=longest)
    assert_correct(slot, problem, inputs, outputs, do, cu)
