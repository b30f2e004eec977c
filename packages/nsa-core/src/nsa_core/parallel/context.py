"""ContextParallel: a style of parallelize_module that divides the sequence of NSAttention."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.layer.gating import compute_gates
from nsa_core.layer.input_checks import check_plan
from nsa_core.layer.module import NSAttention, ParallelForward
from nsa_core.layer.rope import rope_table
from nsa_core.packing import token_positions
from nsa_core.parallel import heads, sequence
from nsa_core.parallel.agreement import agreed, values_of_layer
from nsa_core.parallel.collectives import group_name
from nsa_core.parallel.exchange_rows import RankCall, Ranks
from nsa_core.parallel.layouts import check_layout, pieces_per_rank
from nsa_core.parallel.shards import Shards
from nsa_core.plan.default_plan import default_plan, planned_length
from nsa_core.plan.finite_checks import checked_plan
from nsa_core.torch_ops.packing_checks import check_cu_seqlens, has_values

if TYPE_CHECKING:
    from nsa_core.plan.plan import Plan

MODES = ("auto", "heads", "sequence")


class ContextParallel(ParallelStyle):
    """Divide the sequence of an :class:`nsa_core.NSAttention` over the ranks of a mesh.

    Each rank passes its rows of x, with the ``cu_seqlens`` and ``max_seqlen`` of the whole
    sequence, and gets its rows of the output: those of one process. Gradients of x are those of one
    process too. Gradients of parameters are the part of this rank's rows, to be summed over the
    ranks by DistributedDataParallel or ``fully_shard`` over all ranks, those of the mesh included.

    Modes:

        heads     an all-to-all gives each rank all rows of n_kv_heads / P key/value heads. The
                  number of ranks P must divide n_kv_heads. The attention has the bits of one
                  process; linear layers may round differently, because they see fewer rows.
        sequence  each rank keeps its queries and gets the keys that they read. P is not limited.
        auto      heads if P divides n_kv_heads, else sequence.

    A mesh of one rank changes nothing and runs no collective. Over a cache, a layer of this style
    raises Unsupported: generate with a model without it.

    Args:
        mode: "auto", "heads" or "sequence".
        layout: the rows of a rank, as in :class:`nsa_core.parallel.Shards`: "head_tail" or
            "contiguous". :func:`nsa_core.parallel.choose_layout` computes the faster one.
        reduce_dtype: dtype in which gradients of keys and values are summed over the ranks, if it
            is wider than theirs.

    Raises:
        InvalidInput: an argument is invalid; or, from ``parallelize_module``, the module is not an
            NSAttention or is divided already, the mesh has several dimensions, or P does not divide
            n_kv_heads in mode heads.

    Example:
        >>> mesh = init_device_mesh("cuda", (dp, cp), mesh_dim_names=("dp", "cp"))
        >>> parallelize_module(model, mesh["cp"], {"blocks.*.attn": ContextParallel()})
        >>> shards = Shards(total, cp, mesh["cp"].get_local_rank())
        >>> y = model(shards.take(tokens), cu_seqlens=cu_seqlens, max_seqlen=longest)
    """

    def __init__(
        self,
        mode: str = "auto",
        layout: str = "head_tail",
        *,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise InvalidInput(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        check_layout(layout)
        if not isinstance(reduce_dtype, torch.dtype) or not reduce_dtype.is_floating_point:
            raise InvalidInput(
                f"reduce_dtype must be a floating-point torch.dtype, got {reduce_dtype!r}"
            )
        self.mode, self.layout, self.reduce_dtype = mode, layout, reduce_dtype

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = layer_to_divide("ContextParallel", module, device_mesh)
        world, config = device_mesh.size(), layer.config
        mode = self.mode
        if mode == "auto":
            mode = "sequence" if config.n_kv_heads % world else "heads"
        if mode == "heads" and config.n_kv_heads % world:
            raise InvalidInput(
                f"mode 'heads' needs a mesh whose size divides n_kv_heads: {world} ranks do not"
                f" divide {config.n_kv_heads} key/value heads; use mode='sequence' or mode='auto'"
            )
        if world == 1:
            return module
        rank = Shards(0, world, device_mesh.get_local_rank(), self.layout)
        share = heads_of_one_rank(config, world) if mode == "heads" else config
        layer.parallel = DividedSequence(
            mode, rank, group_name(device_mesh.get_group()), self.reduce_dtype, share
        )
        return module


def layer_to_divide(style: str, module: nn.Module, mesh: DeviceMesh) -> NSAttention:
    """Return ``module`` if a style can divide it over ``mesh``.

    Raises:
        InvalidInput: it is not an NSAttention, or is divided already, or the mesh has several
            dimensions.
    """
    if not isinstance(module, NSAttention):
        raise InvalidInput(
            f"{style} divides NSAttention layers, got {type(module).__name__}: name the attention"
            ' layers in the plan of parallelize_module, for example {"blocks.*.attn": ...}'
        )
    if module.parallel is not None:
        raise InvalidInput(
            f"{style}: the layer is divided already, by {type(module.parallel).__name__}: apply one"
            " style, once"
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        example = f"mesh[{names[-1]!r}]" if names else "mesh['cp'], with mesh_dim_names"
        raise InvalidInput(
            f"{style} needs a mesh of one dimension, got {mesh.ndim} dimensions"
            f" {tuple(mesh.shape)}: pass one of them, for example {example}"
        )
    return module


def heads_of_one_rank(config: NSAConfig, world: int) -> NSAConfig:
    """Return ``config`` with the heads of one of ``world`` ranks."""
    return dataclasses.replace(
        config, n_heads=config.n_heads // world, n_kv_heads=config.n_kv_heads // world
    )


@dataclasses.dataclass(frozen=True)
class DividedSequence(ParallelForward):
    """The forward of a layer whose sequence is divided over ranks.

    Attributes:
        mode: "heads" or "sequence".
        rank: the Shards of this rank with no rows; it holds P, the rank and the layout.
        group: name of the process group.
        reduce: dtype in which gradients are summed.
        share: the config of the plan: in mode heads with the heads of one rank, else the layer's.
    """

    refusal: ClassVar[str] = (
        "context parallel: this layer holds a part of the sequence, by ContextParallel; load the"
        " parameters into a model without the style"
    )

    mode: str
    rank: Shards
    group: str
    reduce: torch.dtype
    share: NSAConfig

    def forward(
        self,
        layer: NSAttention,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        max_seqlen: int | None,
        plan: Plan | None,
    ) -> torch.Tensor:
        """Apply ``layer`` to the rows of this rank, as NSAttention.forward.

        Raises:
            InvalidInput: the rows, the documents or the plan do not fit; or, with NSA_CHECK=1, the
                ranks do not agree.
        """

        def prepare() -> tuple[RankCall, Ranks]:
            layer._check_input(x, cu_seqlens, max_seqlen)
            ranks = Ranks.of(self.rank, x.shape[-2] * self.rank.world, self.group, self.reduce)
            return self._prepared(layer, x, cu_seqlens, max_seqlen, plan, ranks), ranks

        def values(call: tuple[RankCall, Ranks] | None) -> dict[str, object]:
            return {
                "the layout": self.rank.layout,
                "the mode": self.mode,
                "reduce_dtype": self.reduce,
                **values_of_layer(layer, x, cu_seqlens, max_seqlen, call and call[0].plan),
            }

        call, ranks = agreed(prepare, values, self.group, x)
        attend = heads.attend if self.mode == "heads" else sequence.attend
        y: torch.Tensor = layer.out(attend(layer, call, cu_seqlens, max_seqlen, ranks).flatten(-2))
        return y

    def _prepared(
        self,
        layer: NSAttention,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        max_seqlen: int | None,
        plan: Plan | None,
        ranks: Ranks,
    ) -> RankCall:
        """Check the rows and the documents, project the rows, and resolve the plan."""
        rows, layout = x.shape[-2], ranks.layout
        if rows % pieces_per_rank(layout):
            raise InvalidInput(
                f"x must have an even number of rows for layout {layout!r}, got {rows}: pad the"
                " whole sequence with pad_to() and pass the rows of Shards.take()"
            )
        if has_values(cu_seqlens):
            check_cu_seqlens(cu_seqlens, ranks.total, max_seqlen)
        product, table, config = layer.product(x), None, layer.config
        if config.rope:  # the angles of this rank's rows by their positions in their documents
            positions = [
                torch.arange(first, end, device=product.device)
                if cu_seqlens is None
                else token_positions(cu_seqlens, end - first, first).position
                for first, end in ranks.pieces
            ]
            angles = (config.qk_dim, config.frequencies, product.dtype)
            table = rope_table(torch.cat(positions), *angles)
        q, raw, ks, vs = layer.rotated(product, table)
        gates = compute_gates(layer.gate, x)
        tensors = (q, gates, *raw, *ks, *vs)
        packed, partial = cu_seqlens is not None, self.mode == "sequence"
        if plan is not None:
            wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
            check_plan(plan, self.share, q, packed, wants_grad, partial)
        else:
            seq_len, needs_grad = planned_length(ranks.total, packed), layer._needs_grad(x)
            plan = default_plan(
                self.share, q.device, q.dtype, packed, needs_grad, layer.backends, seq_len, partial
            )
        plan = checked_plan(plan, layer.layer) if layer.check else plan
        return RankCall(plan, q, gates, raw, ks, vs)
