"""The stated workspace of a fused form, compared with a measured one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from nsa_core.cache.step import MAX_FUSED_GATE_TOKENS
from nsa_core.layer.module import NSAttention
from nsa_core.plan.plan import Plan
from nsa_core.torch_ops.call_wrapper import Where, wrapped_calls
from nsa_verify.checks.core import CORE_INPUTS, CoreRun
from nsa_verify.conformance.kernel_checks import workspace_faults
from nsa_verify.conformance.points import TWO_SEQUENCES
from nsa_verify.problems.combination import Combination

_SEQUENCES = MAX_FUSED_GATE_TOKENS  # of a decode step; more would not call a form of the gates


def fused_workspace_faults(
    combination: Combination, form: str, path: str, dtype: torch.dtype
) -> Iterator[str]:
    """Check the workspace that ``path`` states for ``form``, on the arguments of nsa_core.

    Skips the test if nsa_core does not call the form here.

    Raises:
        NSAError: As the plan of the combination.
    """
    case, calls = TWO_SEQUENCES.case, list[Callable[[], Any]]()
    backward = form == "backward"
    decode = {} if backward else {"needs_grad": False, "phase": "decode"}
    plan = combination.plan(case.config, dtype, **decode)

    def record(
        where: Where, function: Callable[..., Any], arguments: Any, options: Mapping[str, Any]
    ) -> Any:
        if where[1] == ("core" if backward else form):
            outputs = {n: [*x] for n, x in options.items() if isinstance(x, list)}

            def again() -> Any:
                lists = {name: [*x] for name, x in outputs.items()}  # the form may clear it
                return function(*arguments, **{**options, **lists})

            calls.append(again)
        return function(*arguments, **options)

    with wrapped_calls(record):
        before = _backward(plan, combination.device, dtype) if backward else 0
        if not backward:
            _step(plan, combination.device, dtype)
    if not calls:
        calling = "the backward" if backward else f"a decode step of {_SEQUENCES} sequences"
        pytest.skip(f"{calling} calls no fused {form!r}")
    batch = case.batch if backward else _SEQUENCES
    request = dataclasses.replace(plan.requests["cmp"], batch=batch, seq_len=case.tokens)
    yield from workspace_faults(f"fused_workspace[{form!r}]", path, request, calls[-1], before)


def _backward(plan: Plan, device: str, dtype: torch.dtype) -> int:
    """Run a backward; return the bytes of o_cmp, o_sel and o_win, which its workspace includes."""
    case = TWO_SEQUENCES.case
    data = case.data(dtype, device)
    tensors = {name: getattr(data, name) for name in CORE_INPUTS}
    CoreRun(plan, case.config, data, tensors).gradients(data.do)
    return 3 * data.do.nbytes


def _step(plan: Plan, device: str, dtype: torch.dtype) -> None:
    """Run a step of one token, which completes a compression block."""
    case = TWO_SEQUENCES.case
    attn = NSAttention(case.config).to(device, dtype).requires_grad_(False)
    x = torch.zeros(_SEQUENCES, case.tokens - 1, case.config.dim).to(attn.out.weight)
    cache = attn.new_cache(_SEQUENCES, case.tokens, dtype=dtype, plan=plan)
    attn(x[:, :-1], cache=cache)
    attn(x[:, -1:], cache=cache)
