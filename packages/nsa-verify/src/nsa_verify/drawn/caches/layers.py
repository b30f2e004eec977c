"""Layers and inputs whose keys and values are exact in every dtype.

A row of a matrix product may round differently if the product has more rows, so the keys that a
step writes need not equal those of a prefill. Here they do: inputs and weights are small multiples
of powers of two, and every sum of their products is exact in fp32, in any order. So the content of
a cache has one right value, bit for bit, whatever the history.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from nsa_core.config import NSAConfig
from nsa_core.layer.gating import compute_gates
from nsa_core.layer.module import NSAttention
from nsa_core.plan.plan import Plan
from nsa_verify.drawn.caches.history import LayerHistory

# Kinds of phi whose result is exact, too. The others have a GELU or a softmax.
_EXACT_KINDS = ("mean", "linear", "conv")


def exact_k_rows(config: NSAConfig) -> bool:
    """Return whether the keys that a step writes are exact."""
    return not config.qk_norm


def exact_k_cmp(config: NSAConfig) -> bool:
    """Return whether the compressed keys are exact; keys that are rotated before phi are not."""
    rotated_first = config.rope and config.rope_before_compress
    return exact_v_cmp(config) and exact_k_rows(config) and not rotated_first


def exact_v_cmp(config: NSAConfig) -> bool:
    """Return whether the compressed values are exact."""
    size = config.compress_block_size
    power_of_two = size & (size - 1) == 0
    return config.compress in _EXACT_KINDS and (config.compress != "mean" or power_of_two)


class PlannedLayer(NSAttention):
    """A layer whose prefills and long chunks run given plans.

    Attributes:
        prefill_plan: The plan of prefills.
        partial_plan: The plan of long chunks; None: the decode forms run them.
        seed: Seed of the inputs.
    """

    prefill_plan: Plan
    partial_plan: Plan | None
    seed: int

    def resolve_plan(
        self, x: torch.Tensor, q: torch.Tensor, varlen: bool, plan: Plan | None = None
    ) -> Plan:
        """Return ``prefill_plan``."""
        return self.prefill_plan

    def chunk_plan(self, plan: Plan, device: torch.device, dtype: torch.dtype) -> Plan | None:
        """Return ``partial_plan``."""
        return self.partial_plan


def exact_layer(
    history: LayerHistory,
    device: torch.device | str,
    prefill_plan: Plan,
    partial_plan: Plan | None,
) -> PlannedLayer:
    """Return the layer of ``history``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(history.seed)
        attn = PlannedLayer(history.config)
    generator = torch.Generator().manual_seed(history.seed)
    with torch.no_grad():
        for name, parameter in attn.named_parameters():
            values = _exact_values(name, tuple(parameter.shape), generator)
            if values is not None:
                parameter.copy_(values)
    attn.prefill_plan, attn.partial_plan, attn.seed = prefill_plan, partial_plan, history.seed
    return attn.to(device, history.torch_dtype).requires_grad_(False)


def _exact_values(
    name: str, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor | None:
    """Return the values of a parameter; None keeps the values of the initialisation."""
    if name.startswith(("gate.", "out.")) or name.endswith(".query"):
        return None
    if name.endswith(("_norm.weight", "position", "bias")):
        return torch.randint(1, 5, shape, generator=generator) / 4
    if name == "phi_k.weight" or name == "phi_v.weight":  # of conv
        return torch.randint(-2, 3, shape, generator=generator) / 8
    # A matrix: three terms per output are few enough, and enough to tell tokens apart.
    picks = torch.rand(shape, generator=generator).topk(min(3, shape[1]), -1).indices
    signs = torch.randint(0, 2, picks.shape, generator=generator) - 0.5
    return torch.zeros(shape).scatter(-1, picks, signs)


def inputs(tokens: Sequence[int], attn: PlannedLayer) -> torch.Tensor:
    """Return the layer's inputs [len(tokens), dim] of token numbers."""
    rows = [_input(token, attn.config.dim, attn.seed) for token in tokens]
    x = torch.stack(rows) if rows else torch.zeros(0, attn.config.dim)
    return x.to(attn.out.weight)


@functools.lru_cache(maxsize=4096)
def _input(token: int, dim: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * seed + token)
    return torch.randint(-2, 3, (dim,), generator=generator).float()


# q, gates, and k_ and v_ of raw, sel, win, cmp: [rows, heads, D]
Rows = dict[str, torch.Tensor]


class Projections:
    """The rows that a prefill of whole sequences writes to a cache, computed once per sequence."""

    def __init__(self, attn: PlannedLayer) -> None:
        self._attn = attn
        self._known: dict[tuple[int, ...], Rows] = {}

    def of(self, tokens: Sequence[int]) -> Rows:
        """Return the rows of one sequence."""
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = self._project(key)
        return self._known[key]

    def _project(self, tokens: tuple[int, ...]) -> Rows:
        x = inputs(tokens, self._attn)[None]
        with torch.no_grad():
            projected, raw = self._attn.project_with_raw(x)
            gates = compute_gates(self._attn.gate, x)
        pairs: dict[str, Any] = {
            "raw": raw,
            "sel": (projected.k[1], projected.v[1]),
            "win": (projected.k[2], projected.v[2]),
            "cmp": (projected.k_cmp, projected.v_cmp),
        }
        rows = {
            f"{x}_{name}": pair[i][0] for name, pair in pairs.items() for i, x in enumerate("kv")
        }
        return {"q": projected.q[0], "gates": gates[0], **rows}
