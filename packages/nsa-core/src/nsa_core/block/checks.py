"""Checks of the arguments of block_attention and block_attention_decode."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nsa_core.block.plans import BlockPlan, BlockSizes, default_block_plan
from nsa_core.config import is_finite
from nsa_core.errors import InvalidInput
from nsa_core.layer.input_checks import request_problems
from nsa_core.limits import integer_problems, shown
from nsa_core.plan.default_plan import planned_length
from nsa_core.plan.options import backends_problems
from nsa_core.torch_ops.packing_checks import check_packed_transforms, packing_problems
from nsa_core.torch_ops.tensor_checks import Sizes, call_problems, raise_problems
from nsa_core.torch_ops.tensor_kinds import check_types


def check_arguments(
    tensors: Mapping[str, torch.Tensor],
    block_size: object,
    scale: object,
    first_query: int | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    plan: object,
    backends: object,
) -> None:
    """Check all arguments except the fit of the plan.

    Raises:
        InvalidInput: an argument is invalid. The message has a sentence per problem, and the shape,
            dtype and device of every tensor.
        Unsupported: forward-mode differentiation is active, or a packed call is mapped by vmap or
            exported with dynamic sizes.
    """
    check_types(tensors)
    packed, problems = cu_seqlens is not None, []
    if packed:
        check_packed_transforms(cu_seqlens, *tensors.values())
    if first_query is not None and not isinstance(first_query, torch.SymInt):
        problems = integer_problems("first_query", first_query, 0)
    if not problems:
        sizes = Sizes(packed, first_query=first_query)
        problems = call_problems("block_attention", tensors, sizes)
    problems += packing_problems(cu_seqlens, max_seqlen, tensors["q"].device)
    problems += _option_problems(block_size, scale, plan, backends)
    raise_problems(problems, tensors)


def check_decode_arguments(
    tensors: Mapping[str, torch.Tensor],
    block_size: object,
    scale: object,
    plan: object,
    backends: object,
) -> None:
    """Check the arguments of block_attention_decode, as :func:`check_arguments` does."""
    check_types(tensors)
    problems = call_problems("block_attention_decode", tensors, Sizes())
    problems += [
        f"the columns of {name} must be contiguous, its strides are {tensors[name].stride()}: pass"
        " a cache with the layout [..., heads, width]"
        for name in ("k", "v")
        if tensors[name].numel() and tensors[name].stride(-1) != 1
    ]
    if torch.is_grad_enabled() and any(tensors[name].requires_grad for name in ("q", "k", "v")):
        problems.append(
            "q, k or v requires grad, but the decode form has no gradient: call it under"
            " torch.no_grad(), or block_attention with first_query"
        )
    raise_problems(problems + _option_problems(block_size, scale, plan, backends), tensors)


def _option_problems(
    block_size: object, scale: object, plan: object, backends: object
) -> list[str]:
    """Problems of the arguments that are no tensors."""
    problems = integer_problems("block_size", block_size)
    # torch.compile cannot trace the test, and a call without a plan checks the scale anyway.
    if scale is not None and not torch.compiler.is_compiling() and not is_finite(scale):
        problems.append(f"scale must be finite (a number) or None, got {shown(scale)}")
    if plan is not None and backends is not None:
        problems.append(
            f"plan and backends={backends!r} are both passed: plan with"
            f" plan_block_attention(..., backends={backends!r})"
        )
    elif backends is not None and not isinstance(backends, str):
        problems += backends_problems(backends) or [
            f"backends must be None or the name of a backend, got {backends!r}"
        ]
    return problems


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
