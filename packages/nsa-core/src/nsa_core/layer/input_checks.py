"""Checks of the inputs of nsa_attention: types, shapes, dtypes, packing and plan."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from nsa_core.config import NSAConfig, check_config
from nsa_core.dtypes import dtype_name
from nsa_core.errors import InvalidInput
from nsa_core.layer.input_errors import (
    Sizes,
    argument,
    device_errors,
    dtype_errors,
    joined,
    shape_errors,
)
from nsa_core.layer.short_config import (
    NUMBERS,
    Numbers,
    any_passed,
    build_config,
    call_config,
)
from nsa_core.plan.default_plan import check_is_plan
from nsa_core.torch_ops.autograd import refuse_dual
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
    from nsa_core.plan.plan import Plan

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}
INTEGERS = (
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
    config: NSAConfig | None,
    numbers: Numbers,
    plan: Plan | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
) -> tuple[NSAConfig, bool]:
    """Check the inputs of nsa_attention.

    Args:
        inputs: tensors by name; all but q and gates may be None.
        config: the argument ``config``, which the tensors must fit.
        numbers: the arguments that replace fields of a config
            (:data:`nsa_core.layer.short_config.NUMBERS`).
        plan: the argument ``plan``. Its config applies without ``config`` and ``numbers``.
        cu_seqlens: boundaries of packed documents. Their values are checked if they can be read
            (:func:`nsa_core.torch_ops.tensor_checks.has_values`).
        max_seqlen: upper bound of the documents' lengths.

    Returns:
        The config of the call, and whether the call needs a gradient.

    Raises:
        InvalidInput: an input is invalid; the message has a sentence per cause, and the shape,
            dtype and device of every tensor.
        Unsupported: forward-mode differentiation is active.
    """
    if config is not None:
        check_config(config)
    inputs = {n: t for n, t in inputs.items() if t is not None or n in ("q", "gates")}
    check_types(inputs)
    if cu_seqlens is not None:
        check_packed_transforms(cu_seqlens, *inputs.values())
    packed, passed = cu_seqlens is not None, config
    if config is None or any_passed(numbers):
        config = _config_of_call(inputs, config, numbers, plan, packed)
    if torch.compiler.is_compiling():
        problems = _problems(config, tuple(inputs), tuple(inputs.values()), packed)
    else:
        metadata = tuple([(t.shape, t.dtype, t.device) for t in inputs.values()])
        problems = _cached_problems(config, tuple(inputs), metadata, packed)
    # Without valid boundaries it is unknown which axes the tensors must have.
    packing = _boundary_problems(inputs["q"], cu_seqlens, max_seqlen, readable=not problems)
    if problems or packing:
        if not torch.compiler.is_compiling():
            sizes = _required_sizes(passed, numbers, plan, config, packed)
            problems = [] if packed and packing else _causes(inputs, sizes, problems)
        raise InvalidInput("; ".join([*packing, *problems]) + f" ({_described(inputs)})")
    return config, torch.is_grad_enabled() and any(t.requires_grad for t in inputs.values())


def _required_sizes(
    config: NSAConfig | None,
    numbers: Numbers,
    plan: Plan | None,
    config_of_call: NSAConfig,
    packed: bool,
) -> Sizes:
    """Return the sizes for error messages: those of ``config``, or of the plan's config.

    If the config of the call follows from the tensors, they need only fit each other.
    """
    if config is not None:
        return Sizes(config, "config", config.geometry, packed)
    if plan is not None and not any_passed(numbers):
        return Sizes(plan.config, "plan.config", plan.config.geometry, packed)
    return Sizes(None, "", config_of_call.geometry, packed)


def _config_of_call(
    inputs: dict[str, torch.Tensor],
    config: NSAConfig | None,
    numbers: Numbers,
    plan: Plan | None,
    packed: bool,
) -> NSAConfig:
    """Return :func:`nsa_core.layer.short_config.call_config`; name the tensors that do not fit."""
    try:
        return call_config(config, numbers, plan, inputs["q"], inputs["k[sel]"], inputs["v[sel]"])
    except (InvalidInput, IndexError):  # head counts that do not fit, or tensors without heads
        if config is None and not torch.compiler.is_compiling():
            geometry = build_config(1, 1, 1, 1, *numbers).geometry  # raises if it is the cause
            tensors = _as_passed(inputs)
            shapes = {name: tuple(t.shape) for name, t in tensors.items()}
            if errors := shape_errors(shapes, Sizes(None, "", geometry, packed)):
                raise InvalidInput("; ".join(errors) + f" ({_described(inputs)})") from None
        raise


def _as_passed(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the inputs with one entry "k" if one tensor serves all branches; "v" likewise."""
    merged = dict(inputs)
    for name in ("k", "v"):
        entries = {n: t for n, t in inputs.items() if n.startswith(f"{name}[")}
        if len({id(t) for t in entries.values()}) == 1:
            merged = {n: t for n, t in merged.items() if n not in entries}
            merged[name] = entries[f"{name}[sel]"]
    order = ("q", "k", "k[cmp]", "k[sel]", "k[win]", "v", "v[cmp]", "v[sel]", "v[win]", "gates")
    return {n: merged[n] for n in (*order, "k_cmp", "v_cmp", "blocks") if n in merged}


def _described(inputs: dict[str, torch.Tensor]) -> str:
    # torch.compile cannot trace the comparison of identities in _as_passed.
    tensors = inputs if torch.compiler.is_compiling() else _as_passed(inputs)
    return describe(list(tensors), list(tensors.values()))


def _causes(inputs: dict[str, torch.Tensor], sizes: Sizes, problems: list[str]) -> list[str]:
    """Return one sentence per cause of ``problems``; [] if there are none."""
    if not problems:
        return []
    tensors = _as_passed(inputs)
    causes = shape_errors({n: tuple(t.shape) for n, t in tensors.items()}, sizes)
    causes += dtype_errors(tensors) + device_errors(tensors)
    blocks = inputs.get("blocks")
    if blocks is not None and blocks.dtype not in INTEGERS:
        causes.append(f"blocks must be integers, got {dtype_name(blocks.dtype)}")
    if ("k_cmp" in inputs) != ("v_cmp" in inputs):
        causes.append("k_cmp and v_cmp must be passed together: pass both or neither")
    return causes or problems


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
    if "blocks" in inputs and inputs["blocks"].dtype not in INTEGERS:
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


def check_types(inputs: dict[str, torch.Tensor]) -> None:
    """Check that all inputs are dense tensors, not DTensors or dual tensors."""
    refuse_dual("NSA", inputs.values())
    if torch.compiler.is_compiling():
        _refuse_wrong_types(inputs)
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
        _refuse_wrong_types(odd)
        if kinds := [problem for n, t in odd.items() if (problem := kind_problem(n, t))]:
            raise InvalidInput("; ".join(kinds))


def _refuse_wrong_types(inputs: Mapping[str, object]) -> None:
    """Raise InvalidInput if an input is not a tensor, or is a DTensor."""
    if wrong := {n: t for n, t in inputs.items() if not is_tensor(t)}:
        raise InvalidInput("; ".join(_type_errors(wrong)))


def _type_errors(wrong: Mapping[str, object]) -> list[str]:
    """Return one sentence per wrong type among the inputs ``wrong``."""
    by_type: dict[str, list[str]] = {}
    for name, value in wrong.items():
        by_type.setdefault(type(value).__name__, []).append(name)
    errors = []
    for kind, names in by_type.items():
        first = argument(names[0])
        fixes = {
            "DTensor": " (pass to_local() of a DTensor)",
            "ndarray": f": pass torch.from_numpy({first})",
            "list": f": pass torch.tensor({first})",
        }
        branches = names == ["gates"] and isinstance(wrong["gates"], (list, tuple))
        fix = ": pass torch.stack(gates, dim=-1)" if branches else fixes.get(kind, "")
        noun = "tensors" if len(names) > 1 else "a tensor"
        errors.append(f"{joined(names)} must be {noun}, got {kind}{fix}")
    return errors


def _boundary_problems(
    q: torch.Tensor, cu_seqlens: torch.Tensor | None, max_seqlen: int | None, readable: bool
) -> list[str]:
    """Problems of the packing arguments; with ``readable``, of the values of the boundaries too."""
    problems = packing_problems(cu_seqlens, max_seqlen, q.device)
    if problems or not readable or not has_values(cu_seqlens):
        return problems
    try:
        check_cu_seqlens(cu_seqlens, q.shape[0], max_seqlen)
    except InvalidInput as error:
        return [str(error)]
    return []


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
        problems += _config_differences(plan.config, config)
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
