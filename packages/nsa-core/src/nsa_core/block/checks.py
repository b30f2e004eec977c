"""Checks of the arguments of block_attention and block_attention_decode."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nsa_core.config import is_finite
from nsa_core.limits import integer_problems, shown
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
