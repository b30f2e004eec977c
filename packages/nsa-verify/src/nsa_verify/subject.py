"""What is verified (a combination of backends on a device), one run of it, and what a check
finds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS, BackendSpec
from nsa_core.dispatch.plan import Plan, resolve
from nsa_core.dispatch.registry import default_registry
from nsa_core.torch_ops.slot_op import Kernel
from nsa_core.util.text import dtype_name
from nsa_verify.cases import Case, CaseData
from nsa_verify.judge.tensor import LIMITS, LSE_LIMIT, Verdict

if TYPE_CHECKING:
    from nsa_core.dispatch.registry import Registry


@dataclasses.dataclass(frozen=True)
class Finding:
    """One comparison. ``ok`` None: not applicable here, ``detail`` says why.

    ``row``, ``elem`` and ``bias`` are the verdict's errors in units of rounding noise, as parts of
    their limits (1.0 is the limit); None where the check demands equal bits.
    """

    check: str
    slot: str
    case: str
    dtype: str
    quantity: str
    ok: bool | None
    row: float | None = None
    elem: float | None = None
    bias: float | None = None
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A combination of backends, as the user named it, on a device."""

    backends: Mapping[str, str]
    device: str = "cpu"
    registry: Registry | None = None

    def plan(
        self,
        config: NSAConfig,
        dtype: torch.dtype,
        *,
        needs_grad: bool = True,
        varlen: bool = False,
        deterministic: bool = False,
        phase: str = "prefill",
        page_size: int | None = None,
    ) -> Plan:
        """The plan of this combination; resolve()'s errors pass through."""
        return resolve(
            config,
            device=self.device,
            dtype=dtype,
            backends=dict(self.backends),
            needs_grad=needs_grad,
            varlen=varlen,
            deterministic=deterministic,
            phase=phase,
            page_size=page_size,
            registry=self.registry,
        )


def spec_of(subject: Subject, plan: Plan, slot: str) -> BackendSpec:
    """What the backend that ``plan`` chose for ``slot`` declares."""
    entry = (subject.registry or default_registry()).get(plan.choices[slot].backend)
    assert entry.spec is not None  # a chosen backend is ready
    return entry.spec


@dataclasses.dataclass(frozen=True)
class SlotRun:
    """Tensors one slot received and what it returned, gradients ("dq", ...) included."""

    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    do: torch.Tensor | None


OUTPUTS = {
    "cmp": ("o", "lse"),
    "select": ("blocks",),
    "sel": ("o", "lse"),
    "win": ("o", "lse"),
    "combine": ("o",),
}


def run_slot(
    plan: Plan,
    slot: str,
    inputs: Mapping[str, torch.Tensor],
    do: torch.Tensor | None,
    data: CaseData,
) -> SlotRun:
    """Call ``slot`` of ``plan`` on ``inputs`` and, with ``do``, its backward."""
    return run_kernel(getattr(plan, slot), inputs, do, data)


def run_kernel(
    kernel: Kernel, inputs: Mapping[str, torch.Tensor], do: torch.Tensor | None, data: CaseData
) -> SlotRun:
    """Call ``kernel`` on ``inputs`` and, with ``do``, its backward."""
    leaves = {n: t.detach() for n, t in inputs.items()}
    wanted = [n for n in leaves if do is not None and n not in ("blocks", "lse")]
    for name in wanted:
        leaves[name].requires_grad_()
    result = kernel(*leaves.values(), cu_seqlens=data.cu_seqlens, max_seqlen=data.max_seqlen)
    results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    outputs = {n: t.detach() for n, t in zip(OUTPUTS[kernel.slot], results)}
    if do is not None:
        grads = torch.autograd.grad(results[0], [leaves[n] for n in wanted], do)
        outputs |= {f"d{n}": g for n, g in zip(wanted, grads)}
    return SlotRun({n: t.detach() for n, t in leaves.items()}, outputs, do)


def slot_inputs(
    slot: str, data: CaseData, upstream: Mapping[str, SlotRun]
) -> dict[str, torch.Tensor]:
    """The tensors ``slot`` receives: the case's, and what the slots before it returned."""
    if slot == "cmp":
        return {"q": data.q, "k_cmp": data.k_cmp, "v_cmp": data.v_cmp}
    if slot == "select":
        return {"q": data.q, "k_cmp": data.k_cmp, "lse": upstream["cmp"].outputs["lse"]}
    if slot == "sel":
        return {
            "q": data.q,
            "k": data.k_sel,
            "v": data.v_sel,
            "blocks": upstream["select"].outputs["blocks"],
        }
    if slot == "win":
        return {"q": data.q, "k": data.k_win, "v": data.v_win}
    return {"gates": data.gates} | {
        f"o_{b}": upstream[b].outputs["o"] for b in ("cmp", "sel", "win")
    }


def masked_do(case: Case, do: torch.Tensor) -> torch.Tensor:
    """``do`` with zeros outside the judged rows: what is not judged must not reach the
    gradients.
    """
    if case.rows is None:
        return do
    kept = torch.zeros_like(do)
    kept[..., list(case.rows), :, :] = do[..., list(case.rows), :, :]
    return kept


def run_slots(plan: Plan, case: Case, data: CaseData) -> dict[str, SlotRun]:
    """Every slot once, in the order data flows, forward and backward."""
    runs: dict[str, SlotRun] = {}
    do = masked_do(case, data.do)
    for slot in SLOTS:
        runs[slot] = run_slot(
            plan, slot, slot_inputs(slot, data, runs), None if slot == "select" else do, data
        )
    return runs


def judged(
    check: str, slot: str, case: Case, dtype: torch.dtype, verdicts: Mapping[str, Verdict]
) -> Iterator[Finding]:
    """A finding per verdict, its errors as parts of their limits."""
    limits = LIMITS[dtype]
    for quantity, v in verdicts.items():
        most = LSE_LIMIT if quantity == "lse" else limits.elem
        parts = (v.row / limits.row, v.elem / most, v.bias)
        yield Finding(
            check, slot, case.name, dtype_name(dtype), quantity, v.ok, *parts, detail=v.why
        )


def same_bits(
    check: str,
    slot: str,
    case: Case,
    dtype: torch.dtype,
    quantity: str,
    got: torch.Tensor,
    want: torch.Tensor,
) -> Finding:
    """A finding that demands equal bits (NaN equals NaN)."""
    equal = (
        got.shape == want.shape
        and got.dtype == want.dtype
        and bool(torch.equal(bits(got), bits(want)))
    )
    detail = ""
    if not equal and got.shape == want.shape:
        differ = bits(got) != bits(want)
        first = tuple(int(i) for i in differ.nonzero()[0])
        detail = f"{int(differ.sum())} of {differ.numel()} elements differ, first at {first}"
    elif not equal:
        detail = f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    return Finding(check, slot, case.name, dtype_name(dtype), quantity, equal, detail=detail)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as integers of its width; -0.0 counts as 0.0."""
    if not tensor.is_floating_point():
        return tensor
    kinds: dict[int, Any] = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return (tensor + 0.0).contiguous().view(kinds[tensor.element_size()])
