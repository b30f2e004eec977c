"""The subjects of a prefill run: plans, workloads and costs of its combinations and baselines.

A child process builds them again from the settings, to judge or to time one of them.
"""

from __future__ import annotations

import functools

import torch

from nsa_bench import cells, isolation, roofline
from nsa_bench.baselines import Baseline, dense_baselines
from nsa_bench.cells import Cell
from nsa_bench.gate import judge_plan
from nsa_bench.inputs import Inputs, load_models, make_inputs
from nsa_bench.rivals import rivals
from nsa_bench.roofline import Cost, Peaks
from nsa_bench.settings import Settings
from nsa_bench.timing import Workload
from nsa_core.config import NSAConfig
from nsa_core.plan.default_plan import planned_length
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import Plan, resolve
from nsa_core.plan.registry import Registry
from nsa_verify.problems.cases import Case
from nsa_verify.problems.combination import Combination


class Subjects:
    """The combinations and baselines of a run.

    Args:
        settings: What the run measures.
        registry: The installed backends.

    Attributes:
        gradients: Whether a phase needs gradients.
        models: Shape -> the checkpoint for real inputs.
        skipped: "baseline, shape dtype" -> why the baseline is not timed.

    Raises:
        InvalidInput: A checkpoint cannot be used.
        BackendUnavailable: A checkpoint is given and safetensors is not installed.
    """

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self.settings, self._registry = settings, registry
        self.gradients = _needs_gradients(settings)
        self.models = load_models(settings.checkpoints, settings.shapes, settings.inputs)
        self.skipped: dict[str, str] = {}
        # (shape, dtype, planned length) -> combination -> plan
        self._plans: dict[tuple[str, str, int | None], dict[str, Plan]] = {}
        # (combination, shape, dtype) -> how the user named it
        self._combinations: dict[tuple[str, str, str], Combination] = {}
        self._dense: dict[str, list[Baseline]] = {}

    def add(
        self, combo: Combination, shape: str, dtype: str, seq_len: int | None, plan: Plan
    ) -> None:
        """Add a combination with its plan."""
        self._plans.setdefault((shape, dtype, seq_len), {})[combo.name] = plan
        self._combinations[combo.name, shape, dtype] = combo

    def in_child(self, cell: Cell, combo: str, key: str) -> functools.partial[Workload]:
        """Return a function that sets up a workload of a cell, to be called in a child process.

        Args:
            cell: The cell.
            combo: Name of the combination whose total or kernel is timed; "" for a baseline.
            key: Key of the workload.
        """
        plan = self.plans_of(cell).get(combo)
        return functools.partial(
            workload_in_child,
            self.settings,
            isolation.only_of(self._registry, plan) if plan else self._registry,
            self._combinations.get((combo, cell.shape, cell.dtype)),
            cell,
            key,
        )

    def plan(
        self, config: NSAConfig, dtype: torch.dtype, combo: Combination, seq_len: int | None
    ) -> Plan:
        """Return the plan that a call with these backends would use."""
        options = _options(self.settings, dtype, combo, seq_len)
        return resolve(config, options, registry=self._registry)

    def plans_of(self, cell: Cell) -> dict[str, Plan]:
        """Return the plan of each combination that was added for a cell."""
        seq_len = planned_length(cell.length, False)
        return self._plans.get((cell.shape, cell.dtype, seq_len), {})

    def baselines(self, cell: Cell) -> list[Baseline]:
        """Return the baselines that run here; the others go to ``skipped`` with their reasons."""
        key = f"{cell.shape} {cell.dtype}"
        if key not in self._dense:
            target = (cell.config, self.settings.device, getattr(torch, cell.dtype))
            self._dense[key] = dense_baselines(*target) + rivals(self.settings.rivals, *target)
            for baseline in self._dense[key]:
                if baseline.reason:
                    self.skipped[f"{baseline.name}, {key}"] = baseline.reason
        return [baseline for baseline in self._dense[key] if not baseline.reason]

    def workloads(
        self, cell: Cell, plans: dict[str, Plan], baselines: list[Baseline]
    ) -> list[Workload]:
        """Return the workloads of a cell for these combinations and baselines, on one input."""
        s = self.settings
        # The kernels of "both" are timed alone only if forward and backward are not measured.
        parts = cell.phase != "both" or not {"forward", "backward"} <= {*s.phases}

        @functools.cache
        def inputs() -> Inputs:
            return make_inputs(
                cell.inputs,
                cell.config,
                batch=cell.batch,
                length=cell.length,
                dtype=getattr(torch, cell.dtype),
                device=s.device,
                seed=s.seed,
                text=s.text,
                model=self.models[cell.shape].model if self.models else None,
            )

        problem = (cell.config, cell.phase, cell.length)
        return cells.cell_workloads(inputs, *problem, plans, baselines, parts)

    def is_foreign(self, cell: Cell, subject: str) -> bool:
        """Return whether ``subject`` is a combination with a third-party backend."""
        plan = self.plans_of(cell).get(subject)
        return plan is not None and isolation.is_foreign(self._registry, plan)

    def floor_ms(self, cell: Cell, subject: str, peaks: Peaks) -> float:
        """Return the least time of a combination or baseline on this machine, in ms."""
        return peaks.floor_ms(self.cost(cell, subject))

    def cost(self, cell: Cell, subject: str) -> Cost:
        """Return the cost of a combination or baseline."""
        baseline = {b.name: b for b in self.baselines(cell)}.get(subject)
        config = cell.config if baseline is None else baseline.config or cell.config
        is_dense = baseline is not None and baseline.config is None
        return self.costs(cell, config)["dense" if is_dense else "total"]

    def costs(self, cell: Cell, config: NSAConfig) -> dict[str, Cost]:
        """Return the costs of dense attention, of a whole core, and of each of its parts."""
        element = torch.finfo(getattr(torch, cell.dtype)).bits // 8
        return roofline.part_costs(config, cell.batch, cell.length, element, cell.phase)


def _needs_gradients(settings: Settings) -> bool:
    return any(phase != "forward" for phase in settings.phases)


def _options(
    settings: Settings, dtype: torch.dtype, combo: Combination, seq_len: int | None
) -> PlanOptions:
    return PlanOptions(
        device=settings.device,
        dtype=dtype,
        backends=dict(combo.backends),
        needs_grad=_needs_gradients(settings),
        seq_len=seq_len,
    )


def workload_in_child(
    settings: Settings, registry: Registry, combo: Combination | None, cell: Cell, key: str
) -> Workload:
    """Set up one workload of a cell in a child process.

    Args:
        settings: The settings of the run.
        registry: Its backends.
        combo: The combination whose total or kernel is timed; None for a baseline.
        cell: The cell.
        key: Key of the workload.
    """
    subjects, plans = Subjects(settings, registry), {}
    if combo is not None:
        dtype, seq_len = getattr(torch, cell.dtype), planned_length(cell.length, False)
        options = _options(settings, dtype, combo, seq_len)
        plans[combo.name] = resolve(cell.config, options, registry=registry)
    baselines = [] if combo else [b for b in subjects.baselines(cell) if b.name == key]
    return next(w for w in subjects.workloads(cell, plans, baselines) if w.key == key)


def judge_combo(
    settings: Settings,
    registry: Registry,
    combo: Combination,
    case: Case,
    dtype: torch.dtype,
    seq_len: int | None,
) -> list[str]:
    """Plan and judge a combination, in this process or in a child."""
    plan = resolve(case.config, _options(settings, dtype, combo, seq_len), registry=registry)
    return judge_plan(plan, case, dtype, settings.device, _needs_gradients(settings))
