"""Plans of block_attention: the sizes of a call, the backend that runs it, and whether both fit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput, NSAError
from nsa_core.layer.input_checks import request_problems
from nsa_core.plan.default_plan import (
    CACHED,
    ObjectCache,
    constant_result,
    options_of,
    planned,
    planned_length,
)
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import SlotPlan, resolve_slot
from nsa_core.plan.registry import Registry

# Blocks of more keys are split into blocks of one of these sizes, which all kernels take.
LARGEST_BLOCK = 256
_MANY_PARTS = 16
_PART_SIZES = (256, 128, 64, 32, 16)


class BlockSizes(NamedTuple):
    """The sizes of a call that its plan depends on."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    block_size: int
    n_blocks: int
    scale: float | None
    page_size: int | None = None  # of a paged cache: a block lies inside a page

    @property
    def softmax_scale(self) -> float:
        """The factor of q k^T."""
        return float(self.head_dim**-0.5 if self.scale is None else self.scale)

    @property
    def kernel_blocks(self) -> tuple[int, int]:
        """(keys of a block, number of blocks) of the calls of the kernel."""
        size = kernel_block(self.block_size, self.page_size)
        return size, max(1, self.n_blocks * self.parts)

    @property
    def parts(self) -> int:
        """The blocks of the kernel that make one block of the call."""
        return self.block_size // kernel_block(self.block_size, self.page_size)

    def config(self) -> NSAConfig:
        """Return a config whose selected branch is the call; the other branches are not planned."""
        size, count = self.kernel_blocks
        return NSAConfig(
            self.n_heads * self.head_dim,
            self.n_heads,
            self.n_kv_heads,
            self.head_dim,
            self.v_head_dim,
            compress_block_size=size,
            compress_stride=size,
            select_block_size=size,
            num_selected_blocks=count,
            init_blocks=0,
            local_blocks=0,
            window_size=1,
            rope=False,
            scale=self.scale,
        )


def kernel_block(block_size: int, page_size: int | None = None) -> int:
    """Return the keys of a block as the kernels see it: a divisor of ``block_size``.

    It also divides ``page_size`` if one of ``block_size``, 256, 128, 64, 32 and 16 can.
    """
    if block_size <= LARGEST_BLOCK and (page_size or 0) % block_size == 0:
        return block_size
    fitting = (s for s in _PART_SIZES if block_size % s == 0 and (page_size or 0) % s == 0)
    return next(fitting, block_size)


def split_blocks(blocks: torch.Tensor, sizes: BlockSizes, keys: int) -> torch.Tensor:
    """Return ``blocks`` as int32 or int64, each as the blocks that the kernels see.

    No value wraps around into the range of valid indices.

    Args:
        blocks: the blocks of the call.
        sizes: the sizes of the call.
        keys: the length of the longest sequence, or an upper bound. Parts after it are left out.
    """
    parts = sizes.parts
    if blocks.dtype not in (torch.int32, torch.int64):
        blocks = blocks.to(torch.int64)
    if parts == 1:
        return blocks
    # A block that no sequence reaches stays out of reach: it holds the tokens from about 2^31 on.
    first = blocks.clamp(-1, 2**31 // parts - 1).to(torch.int32)[..., None] * parts
    count = parts
    if parts > _MANY_PARTS:  # otherwise torch.compile would guard on the number of keys
        count = min(parts, -(-keys // kernel_block(sizes.block_size, sizes.page_size)))
    return (first + torch.arange(count, device=blocks.device, dtype=torch.int32)).flatten(-2)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockPlan(SlotPlan):
    """The backend of calls of block_attention, chosen by :func:`nsa_core.plan_block_attention`.

    A plan is immutable. copy() and deepcopy() return the plan itself. Unpickling resolves a new
    plan from the same sizes, options and explicitly chosen backend.

    Attributes:
        request: The request that the backend accepted. Its block size and number of blocks are
            those of the kernel: blocks of more than 256 keys are split.
        choice: The chosen backend, and all candidates.
        kernel: The kernel.
        sizes: The sizes as passed.
    """

    sizes: BlockSizes

    def explain(self) -> str:
        """Describe the plan: the request, the chosen backend and the other candidates.

        Returns:
            Plain text of several lines. Each other candidate is listed with its reasons.
        """
        return "\n".join(filter(None, [super().explain(), _split_note(self.sizes)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return resolve_blocks, (self.sizes, self.options())


def resolve_blocks(
    sizes: BlockSizes, options: PlanOptions, *, registry: Registry | None = None
) -> BlockPlan:
    """Choose the backend of calls of ``sizes``, as :func:`nsa_core.resolve` does."""
    try:
        plan = resolve_slot(sizes.config(), "sel", options, registry=registry)
    except NSAError as error:
        if note := _split_note(sizes):
            error.args = (f"{error}\n{note}",)
        raise
    return BlockPlan(plan.config, plan.request, plan.choice, plan.kernel, sizes)


def _split_note(sizes: BlockSizes) -> str:
    """Return a line about the split of blocks; "" if none are split."""
    size, count = sizes.kernel_blocks
    if size == sizes.block_size:
        return ""
    return f"  {sizes.n_blocks} blocks of {sizes.block_size} keys run as {count} blocks of {size}"


def default_block_plan(
    sizes: BlockSizes,
    device: torch.device,
    dtype: torch.dtype,
    varlen: bool,
    partial: bool,
    wants_grad: bool,
    backends: str | None,
    seq_len: int | None,
) -> BlockPlan:
    """Return the cached plan of calls without an explicit plan.

    The plan supports gradients if a backend does, so that a call runs the same kernels with and
    without grad mode.

    Raises:
        Unsupported, BackendUnavailable, InvalidInput: As :func:`nsa_core.resolve`.
    """
    arguments = (tuple(sizes), device, dtype, varlen, wants_grad, backends, seq_len, partial)
    if torch.compiler.is_compiling():
        plan: BlockPlan = getattr(_plans, _plan_name(*arguments))
        return plan
    return planned(_plans.get, *arguments)


@constant_result  # planning calls plugin code, which torch.compile must not trace
def _plan_name(*arguments: Any) -> str:
    """Return the name of the attribute of ``_plans`` that holds the plan."""
    return planned(_plans.name_of, *arguments)


def _resolve_default(sizes: tuple[Any, ...], *options: Any) -> BlockPlan:
    return resolve_blocks(BlockSizes(*sizes), options_of(*options))


_plans = ObjectCache(_resolve_default)


def plan_of_call(
    tensors: Mapping[str, torch.Tensor],
    sizes: BlockSizes,
    packed: bool,
    partial: bool,
    tokens: int,
    plan: BlockPlan | None,
    backends: str | None,
) -> BlockPlan:
    """Return ``plan``, or the cached plan of calls without an explicit plan.

    Args:
        tensors: q, k, v and blocks by name.
        sizes: The sizes of the call.
        packed: Whether the call is packed.
        partial: Whether queries begin inside their sequences.
        tokens: Tokens of a sequence.
        plan: The argument ``plan``.
        backends: The argument ``backends``.

    Raises:
        InvalidInput: ``plan`` does not fit the call.
        Unsupported, BackendUnavailable: As :func:`nsa_core.resolve`.
    """
    q = tensors["q"]
    needs_grad = torch.is_grad_enabled() and any(tensors[name].requires_grad for name in "qkv")
    if plan is not None:
        check_plan(plan, sizes, q, packed, partial, needs_grad)
        return plan
    length = planned_length(tokens, packed)
    return default_block_plan(
        sizes, q.device, q.dtype, packed, partial, needs_grad, backends, length
    )


@functools.lru_cache(maxsize=CACHED)
def default_decode_plan(
    sizes: BlockSizes,
    device: torch.device,
    dtype: torch.dtype,
    backends: str | None,
    deterministic: bool,
) -> BlockPlan:
    """Return the cached plan of decode steps without an explicit plan; raises as other calls."""
    options = PlanOptions(
        device=device,
        dtype=dtype,
        backends=backends,
        deterministic=deterministic,
        phase="decode",
        page_size=sizes.page_size,
    )
    return resolve_blocks(sizes, options)


def check_plan(
    plan: object,
    sizes: BlockSizes,
    q: torch.Tensor,
    packed: bool = False,
    partial: bool = False,
    needs_grad: bool = False,
    phase: str = "prefill",
) -> None:
    """Check that ``plan`` fits a call with the queries ``q``.

    Raises:
        InvalidInput: it does not; the message names what the plan is for and what the call needs.
    """
    if not isinstance(plan, BlockPlan):
        hint = "; pass the name of a backend as backends=" * isinstance(plan, str)
        raise InvalidInput(
            f"plan must be what nsa_core.plan_block_attention() returns, got"
            f" {type(plan).__name__}{hint}"
        )
    needs: Mapping[str, str | bool] = {
        "needs_grad": needs_grad and "the call needs a gradient",
        "varlen": packed and "cu_seqlens is passed",
        "partial": partial and "q begins inside its sequences or k has more rows",
    }
    problems = request_problems(plan.request, phase, q, needs)
    planned = {**plan.sizes._asdict(), "scale": plan.sizes.softmax_scale}
    called = {**sizes._asdict(), "scale": sizes.softmax_scale}
    problems += [
        f"plan is for {name} {planned[name]}, the call has {called[name]}"
        for name in ("n_heads", "n_kv_heads", "head_dim", "v_head_dim", "scale", "page_size")
        if planned[name] != called[name]
    ]
    if plan.sizes.kernel_blocks != sizes.kernel_blocks:
        problems.append(
            f"plan is for {plan.sizes.n_blocks} blocks of {plan.sizes.block_size} keys, the call"
            f" has {sizes.n_blocks} blocks of {sizes.block_size}"
        )
    if problems:
        raise InvalidInput("; ".join(problems))
