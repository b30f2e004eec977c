"""Checks of the arguments of block_attention."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from nsa_core.block.plans import BlockPlan, BlockSizes
from nsa_core.dtypes import dtype_name
from nsa_core.errors import InvalidInput
from nsa_core.layer.input_checks import INTEGERS, check_types
from nsa_core.limits import integer_problems
from nsa_core.plan.candidates import backends_problems
from nsa_core.torch_ops.tensor_checks import (
    Metadata,
    TensorOrMetadata,
    describe,
    dtype_problems,
    packing_problems,
    tensor_problems,
)
from nsa_core.torch_ops.tensor_kinds import check_packed_transforms

# In these axes, N is the number of keys.
_AXES: dict[str, tuple[str, ...]] = {
    "q": ("B", "S", "Hq", "Dk"),
    "k": ("B", "N", "G", "Dk"),
    "v": ("B", "N", "G", "Dv"),
    "blocks": ("B", "S", "G", "n"),
}


def check_arguments(
    tensors: dict[str, Any],
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
    packed = cu_seqlens is not None
    if packed:
        check_packed_transforms(cu_seqlens, *tensors.values())
    if torch.compiler.is_compiling():
        problems = _problems(tuple(tensors.values()), packed)
    else:
        metadata = tuple([(t.shape, t.dtype, t.device) for t in tensors.values()])
        problems = [*_cached_problems(metadata, packed)]
    if not problems:
        problems = _row_problems(tensors["q"], tensors["k"], first_query)
    problems += packing_problems(cu_seqlens, max_seqlen, tensors["q"].device)
    problems += _backend_problems(plan, backends)
    _raise(problems, tensors)


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


def _raise(problems: list[str], tensors: dict[str, Any]) -> None:
    """Raise InvalidInput with ``problems``, if there are any, and the metadata of all tensors."""
    if problems:
        described = describe(list(tensors), list(tensors.values()))
        raise InvalidInput("; ".join(problems) + f" ({described})")


def _problems(tensors: tuple[TensorOrMetadata, ...], packed: bool) -> list[str]:
    """Problems that the metadata of the tensors q, k, v and blocks shows."""
    q, k, v, blocks = tensors
    problems = tensor_problems(tuple(_AXES), tensors, tuple(_AXES.values()), packed)
    problems += dtype_problems({"q": q, "k": k, "v": v}, {})
    if blocks.dtype not in INTEGERS:
        problems.append(f"blocks must be integers, got {dtype_name(blocks.dtype)}")
    return problems


@functools.lru_cache(maxsize=1024)
def _cached_problems(metadata: tuple[tuple[Any, ...], ...], packed: bool) -> list[str]:
    """:func:`_problems`, cached; ``metadata`` has the fields of each tensor's Metadata."""
    return _problems(tuple(Metadata(*fields) for fields in metadata), packed)


def _row_problems(q: torch.Tensor, k: torch.Tensor, first_query: int | None) -> list[str]:
    """Problems of ``first_query`` and of the number of keys."""
    rows, keys = q.shape[-3], k.shape[-3]
    if first_query is None:
        if rows == keys:
            return []
        return [
            f"q has {rows} rows and k has {keys}: pass first_query, the position of the first row"
            " of q among the keys"
        ]
    if not isinstance(first_query, torch.SymInt):
        if problems := integer_problems("first_query", first_query, 0):
            return problems
    elif first_query < 0:
        return [f"first_query must be an integer >= 0, got {first_query}"]
    if keys < first_query + rows:
        return [
            f"k has {keys} rows, but the {rows} rows of q from first_query = {first_query} on need"
            f" at least {first_query + rows}"
        ]
    return []


# In these axes, P is the number of pages (contiguous: of sequences, B), and N the rows of each.
_DECODE_AXES: dict[str, tuple[str, ...]] = {
    "q": ("B", "m", "Hq", "Dk"),
    "k": ("P", "N", "G", "Dk"),
    "v": ("P", "N", "G", "Dv"),
    "blocks": ("B", "m", "G", "n"),
    "lengths": ("B",),
    "starts": ("B",),
    "block_table": ("B", "pages"),
}


def check_decode_arguments(tensors: dict[str, Any], plan: object, backends: object) -> None:
    """Check the arguments of block_attention_decode, as :func:`check_arguments` does."""
    check_types(tensors)
    metadata = tuple([(t.shape, t.dtype, t.device) for t in tensors.values()])
    problems = [*_decode_problems(tuple(tensors), metadata)]
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
    problems += _backend_problems(plan, backends)
    _raise(problems, tensors)


@functools.lru_cache(maxsize=1024)
def _decode_problems(names: tuple[str, ...], metadata: tuple[tuple[Any, ...], ...]) -> list[str]:
    """Problems that the metadata of the tensors shows."""
    tensors = tuple(Metadata(*fields) for fields in metadata)
    named = dict(zip(names, tensors))
    axes = dict(_DECODE_AXES)
    if "block_table" not in named:
        axes |= {name: ("B", *axes[name][1:]) for name in ("k", "v")}
    problems = tensor_problems(names, tensors, [axes[name] for name in names], False)
    problems += dtype_problems({name: named[name] for name in ("q", "k", "v")}, {})
    if named["blocks"].dtype not in INTEGERS:
        problems.append(f"blocks must be integers, got {dtype_name(named['blocks'].dtype)}")
    problems += [
        f"{name} must be int32, got {dtype_name(tensor.dtype)}: pass {name}.int()"
        for name, tensor in named.items()
        if name in ("lengths", "starts", "block_table") and tensor.dtype != torch.int32
    ]
    return problems


def check_decode_plan(plan: object, sizes: BlockSizes, q: torch.Tensor) -> None:
    """Check that ``plan`` fits this decode step; otherwise as :func:`check_plan`."""
    _check_fit(plan, sizes, q, "decode", {})


def check_plan(
    plan: object, sizes: BlockSizes, q: torch.Tensor, packed: bool, partial: bool, needs_grad: bool
) -> None:
    """Check that ``plan`` fits this call.

    Raises:
        InvalidInput: it does not; the message names what the plan is for and what the call needs.
    """
    reasons = {
        "needs_grad": needs_grad and "the call needs a gradient",
        "varlen": packed and "cu_seqlens is passed",
        "partial": partial and "q begins inside its sequences or k has more rows",
    }
    _check_fit(plan, sizes, q, "prefill", reasons)


def _check_fit(
    plan: object,
    sizes: BlockSizes,
    q: torch.Tensor,
    phase: str,
    reasons: Mapping[str, str | bool],
) -> None:
    """Check that ``plan`` fits a call.

    Args:
        plan: The argument ``plan``.
        sizes: The sizes of the call.
        q: The queries of the call.
        phase: "prefill" or "decode".
        reasons: A field that the plan's request must set -> the reason; falsy: not required.
    """
    if not isinstance(plan, BlockPlan):
        hint = "; pass the name of a backend as backends=" * isinstance(plan, str)
        raise InvalidInput(
            f"plan must be what nsa_core.plan_block_attention() returns, got"
            f" {type(plan).__name__}{hint}"
        )
    planned, request = plan.sizes, plan.request
    problems = []
    if request.phase != phase:
        problems.append(
            f"plan is for {request.phase}, but this call is {phase}: plan with phase={phase!r}"
        )
    problems += [
        f"plan is for {name} {theirs}, the call has {ours}"
        for name, theirs, ours in (
            ("n_heads", planned.n_heads, sizes.n_heads),
            ("n_kv_heads", planned.n_kv_heads, sizes.n_kv_heads),
            ("head_dim", planned.head_dim, sizes.head_dim),
            ("v_head_dim", planned.v_head_dim, sizes.v_head_dim),
            ("scale", planned.softmax_scale, sizes.softmax_scale),
            ("page_size", planned.page_size, sizes.page_size),
        )
        if theirs != ours
    ]
    if planned.kernel_blocks != sizes.kernel_blocks:
        problems.append(
            f"plan is for {planned.n_blocks} blocks of {planned.block_size} keys, the call has"
            f" {sizes.n_blocks} blocks of {sizes.block_size}"
        )
    dtype, device = dtype_name(q.dtype), q.device.type
    if dtype != request.dtype or device not in (request.device, "meta"):
        problems.append(
            f"plan is for {request.dtype} on {request.device}, but the tensors are {dtype} on"
            f" {device}"
        )
    problems += [
        f"plan was made without {field}=True, but {reason}: plan with {field}=True"
        for field, reason in reasons.items()
        if reason and not getattr(request, field)
    ]
    if problems:
        raise InvalidInput("; ".join(problems))
