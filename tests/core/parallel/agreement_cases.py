"""Cases of calls that differ on the last rank, with NSA_CHECK=1."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from block_cases import BLOCK, block_problem
from nsa_core import plan_block_attention, resolve
from nsa_core.parallel import ContextParallel, HeadParallel, Shards, divided_block_attention
from parallel_cases import FORMS, Collectives, divided, problem

OTHER_DOCUMENTS = [0, 5, 56, 56, 58, 80, 112]
Call = Callable[[], Any]


def disagreement(rank: int, world: int, *, of: str, about: str) -> str:
    """Return the number of collectives and the error of a call.

    Args:
        rank: this rank.
        world: number of ranks.
        of: what is called: "sequence" and "heads" are layers of ContextParallel and HeadParallel,
            "grid" is a layer of ContextParallel on each half of the ranks, "blocks" is
            divided_block_attention, "mixed" is a wrapped layer of HeadParallel.
        about: the difference between the call of the last rank and the others; of "mixed", the
            wrapper.
    """
    calls = {
        "sequence": _sequence,
        "heads": _heads,
        "grid": _grid,
        "blocks": _blocks,
        "mixed": _mixed,
    }
    call = calls[of](rank, world, about if rank == world - 1 or of == "mixed" else "")
    os.environ["NSA_CHECK"] = "1"
    try:
        with Collectives() as seen:
            call()
    except Exception as error:  # noqa: BLE001  (a rank may raise anything)
        return f"{sum(seen.counts.values())} collective, {type(error).__name__}: {error}"
    finally:
        del os.environ["NSA_CHECK"]
    return "no error"


def _documents(about: str) -> torch.Tensor:
    bounds = OTHER_DOCUMENTS if about == "documents" else FORMS["packed"][1]
    return torch.tensor(bounds, dtype=torch.int32)


def _sequence(rank: int, world: int, about: str) -> Call:
    options = {"window_size": 10} if about == "config" else {}
    case = problem("packed")._replace(options=options)
    layout = "contiguous" if about == "layout" else "head_tail"
    mode = "heads" if about == "mode" else "sequence"
    reduce_dtype = torch.float64 if about == "reduce_dtype" else torch.float32
    layer = divided(world, case.layer(), mode=mode, layout=layout, reduce_dtype=reduce_dtype)
    rows = Shards(112, world, rank, layout).take(case.x)
    plan = None
    if about in ("plan", "a broken plan"):
        plan = resolve(
            layer.config, partial=True, varlen=True, dtype=torch.float64, needs_grad=True
        )
        renamed = dataclasses.replace(plan.choices["sel"], version="9")
        changes = {"choices": plan.choices | {"sel": renamed}}
        plan = dataclasses.replace(plan, **(changes if about == "plan" else {"requests": {}}))
    layer.recompute = about == "recompute"
    if about == "requires_grad":
        layer.phi_k.requires_grad_(False)
    if about == "dtype":
        layer, rows = layer.float(), rows.float()
    if about == "the dtype of x":
        rows = rows.float()
    if about == "rows":
        rows = rows[:-1]
    max_seqlen = 60 if about == "max_seqlen" else None
    documents = _documents(about)
    if about == "int64 documents":
        documents = documents.long()

    def call() -> None:
        with torch.set_grad_enabled(about != "grad mode"):
            layer(rows, documents, max_seqlen, plan=plan)

    return call


def _heads(rank: int, world: int, about: str) -> Call:
    options = {"window_size": 10} if about == "config" else {}
    case = problem("packed")._replace(options=options)
    layer = parallelize_module(case.layer(), init_device_mesh("cpu", (world,)), HeadParallel())
    plan = "sdpa" if about == "no plan" else None
    x = case.x[:, 1:] if about == "width" else case.x
    return lambda: layer(x, _documents(about), plan=plan)


def _mixed(rank: int, world: int, about: str) -> Call:
    """Wrap a layer of HeadParallel over the ranks of its heads."""
    case, mesh = problem("packed"), init_device_mesh("cpu", (world,))
    layer = parallelize_module(case.layer(), mesh, HeadParallel())
    wrapped = fully_shard(layer, mesh=mesh) if about == "fsdp" else DistributedDataParallel(layer)
    return lambda: wrapped(case.x, case.cu_seqlens)


def _grid(rank: int, world: int, about: str) -> Call:
    both = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "cp"))
    case = problem("packed")
    layer = parallelize_module(case.layer(), both["cp"], ContextParallel("sequence"))
    rows = Shards(112, world // 2, both["cp"].get_local_rank()).take(case.x)
    return lambda: layer(rows, _documents(about))


def _blocks(rank: int, world: int, about: str) -> Call:
    case = block_problem("packed")
    shards = Shards(112, world, rank, "contiguous" if about == "layout" else "head_tail")
    own = [shards.take(x, -3) for x in (case.q, case.k, case.v, case.blocks)]
    options: dict[str, Any] = {"block_size": BLOCK, "cu_seqlens": _documents(about)}
    if about == "a plan for whole sequences":
        options["plan"] = plan_block_attention(
            4, 2, 8, block_size=BLOCK, n_blocks=4, v_head_dim=6, varlen=True, device="cpu",
            dtype="float64",
        )  # fmt: skip
    return lambda: divided_block_attention(*own, shards, **options)
