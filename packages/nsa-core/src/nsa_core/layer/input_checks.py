"""Checks of the inputs of nsa_attention: types, shapes, dtypes, packing and plan."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from nsa_core.config import NSAConfig, check_config
from nsa_core.dispatch.default_plan import check_is_plan
from nsa_core.dtypes import dtype_name
from nsa_core.errors import InvalidInput, Unsupported
from nsa_core.torch_ops.tensor_checks import (
    Metadata,
    TensorOrMetadata,
    check_cu_seqlens,
    describe,
    dtype_problems,
    has_values,
    is_tensor,
    packing_problems,
    tensor_problems,
)
from nsa_core.torch_ops.tensor_kinds import check_packed_transforms, kind_problem

if TYPE_CHECKING:
    from nsa_core.dispatch.plan import Plan

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}
_INTEGERS = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)


def check_inputs(
    inputs: dict[str, Any],
    config: NSAConfig,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
) -> bool:
    """Check the inputs of nsa_attention.

    Args:
        inputs: tensors by name; all but q and gates may be None.
        config: the config that the tensors must fit.
        cu_seqlens: boundaries of packed documents. Their values are checked if they can be read
            (:func:`nsa_core.torch_ops.tensor_checks.has_values`).
        max_seqlen: upper bound of the documents' lengths.

    Returns:
        Whether the call needs a gradient.

    Raises:
        InvalidInput: an input is invalid; the message lists every problem and every tensor.
        Unsupported: forward-mode differentiation is active.
    """
    check_config(config)
    inputs = {n: t for n, t in inputs.items() if t is not None or n in ("q", "gates")}
    _check_types(inputs)
    if cu_seqlens is not None:
        check_packed_transforms(cu_seqlens, *inputs.values())
    packing = _boundary_problems(inputs["q"], cu_seqlens, max_seqlen)
    if torch.compiler.is_compiling():
        problems = _problems(config, tuple(inputs), tuple(inputs.values()), cu_seqlens is not None)
    else:
        metadata = tuple([(t.shape, t.dtype, t.device) for t in inputs.values()])
        problems = _cached_problems(config, tuple(inputs), metadata, cu_seqlens is not None)
    if problems := [*problems, *packing]:
        raise InvalidInput(
            "; ".join(problems) + f" ({describe(list(inputs), list(inputs.values()))})"
        )
    return torch.is_grad_enabled() and any(t.requires_grad for t in inputs.values())


def _problems(
    config: NSAConfig, names: tuple[str, ...], tensors: tuple[TensorOrMetadata, ...], packed: bool
) -> list[str]:
    """Problems that the metadata of the inputs shows."""
    inputs = dict(zip(names, tensors))
    axes: dict[str, tuple[str | int, ...]] = {
        "q": ("B", "S", "Hq", "Dk"),
        "gates": ("B", "S", "Hq", 3),
    }
    axes |= {
        "k_cmp": ("B", "C", "G", "Dk"),
        "v_cmp": ("B", "C", "G", "Dv"),
        "blocks": ("B", "S", "G", "n"),
    }
    shapes = [axes.get(n) or ("B", "S", "G", "Dk" if n[0] == "k" else "Dv") for n in inputs]
    sizes = {"Hq": config.n_heads, "G": config.n_kv_heads, "Dk": config.qk_dim, "Dv": config.v_dim}
    if inputs["q"].dim() == 4 - packed:
        length = inputs["q"].shape[-3]
        sizes["S"] = length
        sizes["C"] = (
            config.geometry.max_compressed(length)
            if packed
            else config.geometry.num_compressed(length)
        )
    problems = tensor_problems(names, tensors, shapes, packed, sizes)
    floats = {n: t for n, t in inputs.items() if n not in ("gates", "blocks")}
    problems += dtype_problems(floats, {"gates": inputs["gates"]})
    if "blocks" in inputs and inputs["blocks"].dtype not in _INTEGERS:
        problems.append(f"blocks must be integers, got {dtype_name(inputs['blocks'].dtype)}")
    if ("k_cmp" in inputs) != ("v_cmp" in inputs):
        problems.append("k_cmp and v_cmp must be passed together: pass both or neither")
    return problems


@functools.lru_cache(maxsize=1024)
def _cached_problems(
    config: NSAConfig, names: tuple[str, ...], metadata: tuple[tuple[Any, ...], ...], packed: bool
) -> list[str]:
    """:func:`_problems`, cached; ``metadata`` contains the fields of each tensor's Metadata."""
    return _problems(config, names, tuple(Metadata(*fields) for fields in metadata), packed)


def _check_types(inputs: dict[str, torch.Tensor]) -> None:
    """Check that all inputs are dense tensors, not DTensors or dual tensors.

    The operators would silently drop the tangent of a dual tensor.
    """
    if torch.compiler.is_compiling():
        _check_odd_types(inputs)
        return
    odd = {
        n: t
        for n, t in inputs.items()
        if type(t) not in _PLAIN_TYPES
        or t.layout is not torch.strided
        or t.is_nested
        or t.is_quantized
    }
    if odd:
        _check_odd_types(odd)
        if kinds := [problem for n, t in odd.items() if (problem := kind_problem(n, t))]:
            raise InvalidInput("; ".join(kinds))
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(t).tangent is not None for t in inputs.values()
    ):
        raise Unsupported(
            "forward-mode differentiation (jvp, jacfwd) of NSA is not supported; use reverse mode"
        )


def _check_odd_types(inputs: dict[str, torch.Tensor]) -> None:
    """Raise InvalidInput if an input is not a tensor, or is a DTensor."""
    problems = [
        f"{n} must be a tensor, got {type(t).__name__}"
        for n, t in inputs.items()
        if not is_tensor(t)
    ]
    if problems:
        raise InvalidInput(
            "; ".join(problems) + " (pass to_local() of a DTensor)" * ("DTensor" in problems[0])
        )


def _boundary_problems(
    q: torch.Tensor, cu_seqlens: torch.Tensor | None, max_seqlen: int | None
) -> list[str]:
    problems = packing_problems(cu_seqlens, max_seqlen, q.device)
    if problems or not has_values(cu_seqlens):
        return problems
    try:
        check_cu_seqlens(cu_seqlens, q.shape[0], max_seqlen)
    except InvalidInput as error:
        return [str(error)]
    return []


def check_plan(
    plan: Plan, config: NSAConfig, q: torch.Tensor, packed: bool, needs_grad: bool
) -> None:
    """Check that ``plan`` fits this prefill call.

    Raises:
        InvalidInput: it does not; the message names what the plan is for and what the call needs.
    """
    check_is_plan(plan)
    request, problems = plan.requests["cmp"], []
    if request.phase != "prefill":
        problems.append(
            f"plan is for {request.phase}, but this call is a prefill: pass a plan resolved with"
            " phase='prefill'"
        )
    if plan.config is not config and plan.config.values != config.values:
        problems.append(f"plan is for {plan.config}, but the call is for {config}")
    if needs_grad and not request.needs_grad:
        problems.append(
            "plan was resolved without needs_grad=True, but the call needs a gradient: resolve"
            " another plan, or call under torch.no_grad()"
        )
    if packed and not request.varlen:
        problems.append(
            "plan was resolved without varlen=True, but cu_seqlens is passed: resolve another plan"
        )
    dtype, device = dtype_name(q.dtype), q.device.type
    if dtype != request.dtype or device not in (request.device, "meta"):
        problems.append(
            f"plan is for {request.dtype} on {request.device}, but the tensors are {dtype} on"
            f" {device}"
        )
    if problems:
        raise InvalidInput("; ".join(problems))
