"""The subjects of a prefill run: plans, workloads and costs of its combinations and baselines.

A child process builds them again from the settings, to time one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from nsa_bench import cells, isolation, roofline
from nsa_bench.baselines import Baseline, dense_baselines
from nsa_bench.cells import Cell
from nsa_bench.inputs import Inputs, load_models, make_inputs
from nsa_bench.rivals import rivals
from nsa_bench.roofline import Cost, Peaks
from nsa_bench.settings import Settings
from nsa_bench.timing import Workload
from nsa_core.config import NSAConfig
from nsa_core.plan.default_plan import planned_length
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import Plan
from nsa_core.plan.registry import Registry


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
        self.gradients = any(phase != "forward" for phase in settings.phases)
        self.models = load_models(settings.checkpoints, settings.shapes, settings.inputs)
        self.skipped: dict[str, str] = {}
        # (shape, dtype, planned length) -> combination -> plan
        self._plans: dict[tuple[str, str, int | None], dict[str, Plan]] = {}
        self._dense: dict[str, list[Baseline]] = {}

    def add(self, combo: str, problem: Cell, seq_len: int | None, plan: Plan) -> None:
        """Add a combination with its plan for calls of a planned length."""
        self._plans.setdefault((problem.shape, problem.dtype, seq_len), {})[combo] = plan

    def options(self, dtype: str, seq_len: int | None = None) -> PlanOptions:
        """Return the options of a plan, for the backends that ``auto`` chooses."""
        where = {"device": self.settings.device, "dtype": getattr(torch, dtype)}
        return PlanOptions(**where, needs_grad=self.gradients, seq_len=seq_len)

    def in_child(self, cell: Cell, combo: str, key: str) -> functools.partial[Workload]:
        """Return a function that sets up a workload of a cell, to be called in a child process.

        Args:
            cell: The cell.
            combo: Name of the combination whose total or kernel is timed; "" for a baseline.
            key: Key of the workload.
        """
        plan, planner = self.plans_of(cell).get(combo), None
        if plan is not None:
            options = self.options(cell.dtype, planned_length(cell.length, False))
            planner = isolation.planner(self._registry, plan, options)
        return functools.partial(workload_in_child, self.settings, planner, combo, cell, key)

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


def workload_in_child(
    settings: Settings,
    planner: Callable[[NSAConfig], Plan] | None,
    combo: str,
    cell: Cell,
    key: str,
) -> Workload:
    """Set up one workload of a cell in a child process.

    Args:
        settings: The settings of the run.
        planner: Returns the plan whose total or kernel is timed; None for a baseline.
        combo: The name of the plan's combination.
        cell: The cell.
        key: Key of the workload.
    """
    subjects, plans = Subjects(settings, Registry(())), dict[str, Plan]()
    if planner is not None:
        plans[combo] = planner(cell.config)
    baselines = [] if plans else [b for b in subjects.baselines(cell) if b.name == key]
    return next(w for w in subjects.workloads(cell, plans, baselines) if w.key == key)
