"""The workloads of one cell, on the same tensors.

They are the whole core of each combination, each of its kernels alone, and the baselines.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nsa_bench.baselines import Baseline
from nsa_bench.inputs import Inputs
from nsa_bench.roofline import PARTS
from nsa_bench.timing import Workload
from nsa_core.config import NSAConfig
from nsa_core.layer.attention import nsa_attention
from nsa_core.layer.phi.kinds import mean_compress
from nsa_core.plan.plan import Plan

PHASES = ("forward", "backward", "both")
TOTAL = "total "
LEAVES = ("q", "k", "v", "gates")  # of Inputs; dense attention has no gates


@dataclasses.dataclass(frozen=True)
class Cell:
    """One configuration to measure: shape, dtype, inputs, phase, batch and length.

    For decode, ``inputs`` is the kind of cache, ``length`` its tokens per sequence including the
    token of the step, and ``page_size`` the tokens per page, or None for a contiguous cache.
    """

    config: NSAConfig
    shape: str
    dtype: str
    inputs: str
    phase: str
    batch: int
    length: int
    page_size: int | None = None


def kernels_of(plan: Plan, length: int) -> dict[str, str]:
    """Return the backend of each kernel that a call on sequences of ``length`` tokens runs.

    In a sequence so short that every token selects all its blocks, "causal" stands for select and
    sel: the call runs causal attention in their place.
    """
    backends = {slot: choice.backend for slot, choice in plan.choices.items()}
    if plan.causal_up_to is not None and length <= plan.causal_up_to:
        del backends["select"]
        backends["causal"] = backends.pop("sel")
    return {name: backends[name] for name in PARTS if name in backends}


def part_key(name: str, backend: str) -> str:
    """Return the key of a kernel alone; combinations with the same kernel share its time."""
    return f"{name} {backend}"


def combo_of(key: str, plans: Mapping[str, Plan], length: int) -> str:
    """Return the combination whose total or kernel a workload times; "" for a baseline."""
    for name, plan in plans.items():
        kernels = (part_key(*kernel) for kernel in kernels_of(plan, length).items())
        if key in (TOTAL + name, "compress", *kernels):
            return name
    return ""


def cell_workloads(
    inputs: Callable[[], Inputs],
    config: NSAConfig,
    phase: str,
    length: int,
    plans: Mapping[str, Plan],
    baselines: Sequence[Baseline],
    parts: bool = True,
) -> list[Workload]:
    """Return every workload of a cell, the most important first.

    The order is dense kernels, "total <combo>", other rivals and, if ``parts``, each kernel alone.
    A time limit drops workloads from the end. The key of a baseline is its name; the key of a
    kernel alone is that of :func:`part_key`, or "compress". ``inputs`` is called when a workload is
    set up, so that workloads which run in a child process need no inputs in this one. Its sequences
    have ``length`` tokens, which decides the kernels: those that the whole core runs.
    """

    def whole(key: str, setup: Callable[[Inputs], Callable[[], Call]]) -> Workload:
        return Workload(key, lambda: setup(inputs())(), True)

    def alone(plan: Plan, name: str, backend: str) -> Workload:
        target = (config, plan, name, phase)
        key = part_key(name, backend)
        return Workload(key, lambda: kernel_workload(inputs(), *target).make())

    by_kind: dict[bool, list[Workload]] = {True: [], False: []}  # whether it is dense attention
    for baseline in baselines:
        setup = functools.partial(_baseline_make, baseline, phase=phase)
        by_kind[baseline.kind == "dense"].append(whole(baseline.name, setup))
    cores = [
        whole(TOTAL + name, functools.partial(_core, config=config, plan=plan, phase=phase))
        for name, plan in plans.items()
    ]
    kernels: dict[str, Workload] = {}
    for plan in plans.values() if parts else ():
        for name, backend in kernels_of(plan, length).items():
            if name != "select" or phase != "backward":  # select has no backward
                kernels.setdefault(part_key(name, backend), alone(plan, name, backend))
    if kernels:
        kernels["compress"] = Workload("compress", lambda: _compress(inputs(), config, phase)())
    return [*by_kind[True], *cores, *by_kind[False], *kernels.values()]


Call = Callable[[], Any]


def _phased(
    forward: Callable[..., Any], leaves: Sequence[torch.Tensor], do: Any, phase: str
) -> Callable[[], Call]:
    """Return a setup function for one phase of ``forward(*leaves)``.

    Each setup creates new leaves over the same memory. Autograd finishes a backward on the stream
    on which a leaf was first used; a CUDA graph captured on another stream would be invalid.
    """

    def make() -> Call:
        own = [leaf.detach().requires_grad_(phase != "forward") for leaf in leaves]

        def only_forward() -> Any:
            with torch.no_grad():
                return forward(*own)

        if phase == "forward":
            return only_forward
        if phase == "both":
            return lambda: torch.autograd.grad(forward(*own), own, do)
        o = forward(*own)
        return lambda: torch.autograd.grad(o, own, do, retain_graph=True)

    return make


def _leaves(x: Inputs) -> list[torch.Tensor]:
    return [getattr(x, name) for name in LEAVES]


def _core(x: Inputs, config: NSAConfig, plan: Plan, phase: str) -> Callable[[], Call]:
    def forward(*leaves: torch.Tensor) -> torch.Tensor:
        return nsa_attention(*leaves, config=config, plan=plan, nonnegative_gates=True)

    return _phased(forward, _leaves(x), x.do, phase)


def _baseline_make(baseline: Baseline, x: Inputs, phase: str) -> Callable[[], Call]:
    """Return the setup function of a baseline; dense attention has no gates."""
    leaves = _leaves(x)[: 3 if baseline.kind == "dense" else 4]

    def forward(*own: torch.Tensor) -> torch.Tensor:
        return baseline.forward(dataclasses.replace(x, **dict(zip(LEAVES, own))))

    return _phased(forward, leaves, x.do, phase)


def _compress(x: Inputs, config: NSAConfig, phase: str) -> Callable[[], Call]:
    def forward(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return mean_compress(k, config.geometry), mean_compress(v, config.geometry)

    with torch.no_grad():
        do = [torch.ones_like(part) for part in forward(x.k, x.v)]
    return _phased(forward, [x.k, x.v], do, phase)


def kernel_workload(x: Inputs, config: NSAConfig, plan: Plan, name: str, phase: str) -> Workload:
    """Return the workload of one kernel alone, on the tensors that it receives in ``plan``.

    ``name`` is a slot, or "causal" (see :func:`kernels_of`).
    """
    kernel: Any = plan.causal_sel if name == "causal" else getattr(plan, name)

    def make() -> Call:
        tensors = [t.detach() for t in _kernel_inputs(x, config, plan, name)]
        if name == "select":
            return lambda: kernel(*tensors)
        leaves, blocks = (
            [t for t in tensors if t.is_floating_point() is floats] for floats in (True, False)
        )
        return _phased(lambda *own: _first(kernel(*own, *blocks)), leaves, x.do, phase)()

    return Workload(part_key(name, kernel.backend), make)


def _first(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


@torch.no_grad()
def _kernel_inputs(x: Inputs, config: NSAConfig, plan: Plan, name: str) -> list[torch.Tensor]:
    if name in ("win", "causal"):
        return [x.q, x.k, x.v]
    k_cmp, v_cmp = (mean_compress(t, config.geometry) for t in (x.k, x.v))
    if name == "cmp":
        return [x.q, k_cmp, v_cmp]
    o_cmp, lse = plan.cmp(x.q, k_cmp, v_cmp)
    if name == "select":
        return [x.q, k_cmp, lse]
    if name == "combine":
        # Any values will do, but the three branches need separate buffers.
        return [x.gates, o_cmp, o_cmp.clone(), o_cmp.clone()]
    return [x.q, x.k, x.v, plan.select(x.q, k_cmp, lse)]
