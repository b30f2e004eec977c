"""Checks of the arguments of block_attention and block_attention_decode."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nsa_core.block.plans import BlockPlan, BlockSizes
from nsa_core.errors import InvalidInput
from nsa_core.layer.input_checks import request_problems
from nsa_core.limits import integer_problems
from nsa_core.plan.options import backends_problems
from nsa_core.torch_ops.packing_checks import check_packed_transforms, packing_problems
from nsa_core.torch_ops.tensor_checks import Sizes, call_problems, raise_problems
from nsa_core.torch_ops.tensor_kinds import check_types


def check_arguments(
    tensors: Mapping[str, torch.Tensor],
    first_query: int | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    plan: object,
    backends: object,
) -> None:
    """Check all arguments except ``block_size``, ``scale`` and the fit of the plan.

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
    raise_problems(problems + _backend_problems(plan, backends), tensors)


def check_decode_arguments(
    tensors: Mapping[str, torch.Tensor], plan: object, backends: object
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
    raise_problems(problems + _backend_problems(plan, backends), tensors)


def _backend_problems(plan: object, backends: object) -> list[str]:
    """Problems of the argument ``backends``."""
    if plan is not None and backends is not None:
        return [
            f"plan and backends={backends!r} are both passed: plan with"
            f" plan_block_attention(..., backends={backends!r})"
        ]
    if backends is None or isinstance(backends, str):
        return []
    return backends_problems(backends) or [
        f"backends must be None or the name of a backend, got {backends!r}"
    ]


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
