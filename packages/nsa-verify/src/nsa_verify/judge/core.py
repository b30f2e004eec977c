"""Judge the output and gradients of the whole core: the gated sum of the branches (Eq. 5).

do_c = g_c do is the gradient of a branch's output. The slots' backwards receive it rounded; a fused
backward may keep it exact. Both are judged against the exact one, with the noise of the former.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nsa_core.contract import BRANCHES
from nsa_core.layout import BlockGeometry
from nsa_verify import oracle
from nsa_verify.judge.tensor import Verdict, gate_rows, heads_first, judge, refused
from nsa_verify.judge.truth_cache import cached
from nsa_verify.reference import attention

Tensors = Mapping[str, torch.Tensor]
# The inputs of each branch besides q; "blocks" comes last.
_INPUTS = {
    "cmp": ("k_cmp", "v_cmp"),
    "sel": ("k_sel", "v_sel", "blocks"),
    "win": ("k_win", "v_win"),
}


class _Sums(NamedTuple):
    """Output and gradients of the core in one arithmetic, and their noise of large scores."""

    results: dict[str, torch.Tensor]
    score_noise: dict[str, torch.Tensor]


def judge_core(
    inputs: Tensors,
    do: torch.Tensor,
    outputs: Tensors,
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    rows: Sequence[int] | None = None,
) -> dict[str, Verdict]:
    """Judge each tensor of ``outputs``.

    Args:
        inputs: q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates and the selected blocks, in the
            shapes of nsa_core.contract.
        do: Gradient of the gated sum, 0 outside ``rows``.
        outputs: o, dq, dgates, dk_cmp, and so on.
        geometry: Block sizes.
        scale: Softmax scale.
        cu_seqlens: Document bounds, int32 [documents + 1]; None if dense.
        rows: Query rows that are judged in dq and dgates; None: all.

    Returns:
        A verdict per output. Its ``where`` is (batch entry, head, row), or (head, row) if packed;
        a row is a position in ``rows`` if they are given.
    """
    dtype = inputs["q"].dtype
    golden, rounded, magnitude = _truths(inputs, do, geometry, scale, cu_seqlens, rows)
    verdicts = {}
    for name, actual in outputs.items():
        like = do if name == "o" else inputs[name[1:]]
        if actual.shape != like.shape or actual.dtype != like.dtype:
            verdicts[name] = refused(f"{tuple(actual.shape)} {actual.dtype}, expected {like.dtype}")
            continue
        noise = magnitude.score_noise.get(name)
        truths = [x.results[name] for x in (golden, rounded, magnitude)]
        tensors = [x for x in (actual, *truths, noise) if x is not None]
        if rows is not None and name in ("o", "dq", "dgates"):
            tensors = [x[..., list(rows), :, :] for x in tensors]
        actual, exact, rounding, size, *noises = (
            gate_rows(x) if name == "dgates" else heads_first(x) for x in tensors
        )
        score_noise = noises[0] if noises else None
        verdicts[name] = judge(
            actual, exact, rounding, size, dtype, grad=name != "o", score_noise=score_noise
        )
    return verdicts


@cached
def _truths(
    inputs: Tensors,
    do: torch.Tensor,
    geometry: BlockGeometry,
    scale: float,
    cu_seqlens: torch.Tensor | None,
    rows: Sequence[int] | None,
) -> tuple[_Sums, _Sums, _Sums]:
    """Return golden, rounded and magnitude; rounded is golden in float64."""
    dtype = inputs["q"].dtype
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "rows": rows}
    exact = inputs["gates"].double().unsqueeze(-2) * do.double().unsqueeze(-1)  # [.., Hq, Dv, 3]

    def run(module: Any, arithmetic: dict[str, Any], do_dtype: torch.dtype) -> _Sums:
        outputs: list[torch.Tensor] = []
        results: dict[str, torch.Tensor] = {}
        score_noise: dict[str, torch.Tensor] = {}
        for branch, of_branch in zip(BRANCHES, exact.unbind(-1)):
            arguments = [inputs[name] for name in ("q", *_INPUTS[branch])]
            truth = getattr(module, branch)(
                *arguments, geometry, scale, do=of_branch.to(do_dtype), **options, **arithmetic
            )
            outputs.append(truth.o)
            for own, values in (("grads", results), ("score_noise", score_noise)):
                for name, value in getattr(truth, own, {}).items():
                    if name == "dq":
                        values["dq"] = values["dq"] + value if "dq" in values else value
                    elif name.startswith("d"):
                        values[f"{name[:2]}_{branch}"] = value
        o = module.combine(inputs["gates"], *outputs, do=do, **arithmetic)
        results |= {"o": o.o, "dgates": o.grads["dgates"]}
        return _Sums(results, score_noise)

    golden = run(oracle, {}, torch.float64)
    tested = {"dtype": dtype}
    rounded = (
        golden
        if dtype == torch.float64
        else run(attention, {"arithmetic": "rounded", **tested}, dtype)
    )
    return golden, rounded, run(attention, {"arithmetic": "magnitude", **tested}, torch.float64)
