"""Checks of the inputs of a layer and of nsa_attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from nsa_core.config import NSAConfig, check_config
from nsa_core.contract import Request
from nsa_core.dtypes import FLOATING, dtype_name
from nsa_core.errors import InvalidInput
from nsa_core.layer.short_config import NUMBERS, Numbers, any_passed, short_config
from nsa_core.plan.default_plan import check_is_plan
from nsa_core.torch_ops.autograd import refuse_dual
from nsa_core.torch_ops.packing_checks import (
    check_cu_seqlens,
    check_packed_transforms,
    has_values,
    packing_problems,
)
from nsa_core.torch_ops.tensor_checks import Sizes, call_problems, raise_problems
from nsa_core.torch_ops.tensor_kinds import check_types, is_tensor, kind_problem, refuse_jit_trace
from nsa_core.torch_ops.torch_state import autocast_enabled

if TYPE_CHECKING:
    from nsa_core.plan.plan import Plan


def check_layer_input(
    x: torch.Tensor,
    dim: int,
    device: torch.device,
    dtype: torch.dtype | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None = None,
) -> None:
    """Check the arguments of a layer's forward, by metadata only.

    Args:
        x: Input of the layer, [B, S, dim] or packed [T, dim].
        dim: Model dimension of the layer.
        device: Device of the layer.
        dtype: Dtype of the layer's projections; None if they compute in the dtype of x.
        cu_seqlens: int32 [documents + 1] for packed documents, else None.
        max_seqlen: Length of the longest document, as a host integer.

    Raises:
        InvalidInput: An argument is wrong; the message names every wrong argument.
        Unsupported: x carries a tangent of forward-mode differentiation, or torch.jit.trace
            records the call.
    """
    refuse_jit_trace()
    if not is_tensor(x):
        fix = " (pass to_local() of a DTensor)" * isinstance(x, torch.Tensor)
        raise InvalidInput(f"x must be a tensor, got {type(x).__name__}{fix}")
    refuse_dual("NSAttention", (x,))
    if problem := kind_problem("x", x):
        raise InvalidInput(problem)
    problems = []
    packed = cu_seqlens is not None
    if x.dim() != 3 - packed or x.shape[-1] != dim:
        form = "[B, S, dim], or [T, dim] with cu_seqlens"
        form = "[T, dim] beside cu_seqlens" if packed else form
        looks = x.dim() == 3 and x.shape[1] == dim != x.shape[2] and not packed
        fix = ": it looks like [B, dim, S], pass x.transpose(1, 2)" * looks
        problems.append(f"x must be {form}, dim = {dim}; got {list(x.shape)}{fix}")
    if x.device != device:
        problems.append(f"x is on {x.device}, the layer on {device}: move one of them")
    if dtype is None and x.dtype not in FLOATING:
        names = ", ".join(map(dtype_name, FLOATING))
        problems.append(f"x is {x.dtype}: pass one of {names}")
    casts = x.is_floating_point() and torch.float64 not in (x.dtype, dtype)  # under autocast
    if x.dtype != (dtype or x.dtype) and not (casts and autocast_enabled(x.device)):
        problems.append(
            f"x is {x.dtype}, the layer's parameters are {dtype}: convert one of them"
            f"{', or use autocast' * casts}"
        )
    if packed:
        check_packed_transforms(cu_seqlens, x)
    if packed or max_seqlen is not None:
        problems += packing_problems(cu_seqlens, max_seqlen, x.device)
    if problems:
        raise InvalidInput("; ".join(problems))


def check_inputs(
    tensors: Mapping[str, torch.Tensor],
    config: NSAConfig | None,
    numbers: Numbers,
    plan: Plan | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
) -> NSAConfig:
    """Check the inputs of nsa_attention, and return the config of the call.

    It is ``config``; else that of ``plan`` if no number is passed; else a config with the head
    counts and widths of the tensors.

    Args:
        tensors: The tensors that are passed, by name.
        config: The argument ``config``, which the tensors must fit.
        numbers: The arguments that replace fields of a config
            (:data:`nsa_core.layer.short_config.NUMBERS`).
        plan: The argument ``plan``.
        cu_seqlens: Boundaries of packed documents. Their values are checked if they can be read
            (:func:`nsa_core.torch_ops.packing_checks.has_values`).
        max_seqlen: Upper bound of the documents' lengths.

    Raises:
        InvalidInput: An input is invalid; the message has a sentence per cause, and the shape,
            dtype and device of every tensor.
        Unsupported: Forward-mode differentiation is active.
    """
    source = "config"
    if config is not None:
        check_config(config)
        if any_passed(numbers):
            passed = [f"{n}={x!r}" for n, x in zip(NUMBERS, numbers) if x is not None]
            raise InvalidInput(
                f"config and {', '.join(passed)} are passed, but config has these fields: pass"
                " either config or the keywords, or change the config with dataclasses.replace"
            )
    elif plan is not None and not any_passed(numbers):
        check_is_plan(plan)
        source, config = "plan.config", plan.config
    check_types(tensors)
    packed = cu_seqlens is not None
    if packed:
        check_packed_transforms(cu_seqlens, *tensors.values())
    problems = packing_problems(cu_seqlens, max_seqlen, tensors["q"].device)
    # Without valid boundaries it is unknown which axes the tensors must have.
    if not (packed and problems):
        problems += call_problems("nsa_attention", tensors, Sizes(packed, config, source))
    if ("k_cmp" in tensors) != ("v_cmp" in tensors):
        problems.append("k_cmp and v_cmp must be passed together: pass both or neither")
    raise_problems(problems, tensors)
    if config is None:
        k, v = (tensors[n if n in tensors else f"{n}[sel]"] for n in ("k", "v"))
        config = short_config(numbers, tensors["q"], k, v)
        if "k_cmp" in tensors:  # their number of rows depends on the block sizes
            problems = call_problems("nsa_attention", tensors, Sizes(packed, config))
            raise_problems(problems, tensors)
    if has_values(cu_seqlens):
        check_cu_seqlens(cu_seqlens, tensors["q"].shape[0], max_seqlen)
    return config


def request_problems(
    request: Request, phase: str, q: torch.Tensor, needs: Mapping[str, str | bool]
) -> list[str]:
    """Return why a plan for ``request`` does not fit a call; [] if it does.

    Args:
        request: The request of the plan.
        phase: The phase of the call, "prefill" or "decode".
        q: The queries of the call.
        needs: A field that the request must set -> why the call needs it; falsy: it does not.
    """
    problems = []
    if request.phase != phase:
        kind = "a prefill" if phase == "prefill" else "a decode step"
        problems.append(
            f"plan is for {request.phase}, but this call is {kind}: pass a plan resolved with"
            f" phase={phase!r}"
        )
    dtype, device = dtype_name(q.dtype), q.device.type
    if dtype != request.dtype or device not in (request.device, "meta"):
        problems.append(
            f"plan is for {request.dtype} on {request.device}, but the tensors are {dtype} on"
            f" {device}: pass a plan resolved for these tensors"
        )
    for field, reason in needs.items():
        if reason and not getattr(request, field):
            without = ", or call under torch.no_grad()" * (field == "needs_grad")
            problems.append(
                f"plan was resolved without {field}=True, but {reason}: resolve a plan with"
                f" {field}=True{without}"
            )
    return problems


def check_plan(
    plan: Plan,
    config: NSAConfig,
    q: torch.Tensor,
    packed: bool,
    needs_grad: bool,
    partial: bool = False,
) -> None:
    """Check that ``plan`` fits this prefill call.

    Raises:
        InvalidInput: It does not; the message names what the plan is for and what the call needs.
    """
    check_is_plan(plan)
    inside = "ContextParallel in mode 'sequence' has queries that begin inside a sequence"
    needs = {
        "partial": partial and inside,
        "needs_grad": needs_grad and "the call needs a gradient",
        "varlen": packed and "cu_seqlens is passed",
    }
    problems = request_problems(plan.requests["cmp"], "prefill", q, needs)
    if plan.config is not config and plan.config.values != config.values:
        problems += _config_differences(plan.config, config)
    if problems:
        raise InvalidInput("; ".join(problems))


def _config_differences(planned: NSAConfig, config: NSAConfig) -> list[str]:
    """Return the fields in which a plan's config differs from that of a call, in one sentence.

    Only the fields that the slots depend on count.
    """
    names = [*NUMBERS[:-1], "n_heads", "n_kv_heads", "head_dim", "v_head_dim", "softmax_scale"]
    differing = [n for n in names if getattr(planned, n) != getattr(config, n)]
    if not differing:
        return []
    theirs, ours = (", ".join(f"{n}={getattr(c, n)}" for n in differing) for c in (planned, config))
    return [f"plan is for {theirs}, but the call has {ours}: resolve a plan for this config"]
