"""Plan block_attention or its decode form for what a line describes."""

from __future__ import annotations

from typing import Any

from nsa_core.block.plans import BlockPlan, BlockSizes, resolve_blocks
from nsa_core.plan.options import PlanOptions
from nsa_verify.drawn.line import Drawn
from nsa_verify.problems.combination import Combination


def block_plan(combination: Combination, drawn: Drawn, **options: Any) -> BlockPlan:
    """Return the plan of the backend of sel; ``options`` are other fields of PlanOptions.

    Raises:
        NSAError: No backend of the combination accepts the call.
    """
    sizes = BlockSizes(
        *(drawn.h * drawn.groups, drawn.groups, drawn.dk, drawn.dv),
        *(drawn.block, drawn.n, drawn.scale, options.get("page_size")),
    )
    backends = combination.backends.get("sel")
    planned = PlanOptions(
        device=combination.device, dtype=drawn.torch_dtype, backends=backends, **options
    )
    return resolve_blocks(sizes, planned, registry=combination.registry)
