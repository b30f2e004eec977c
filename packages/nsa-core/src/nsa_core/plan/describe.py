"""A request, and the causal attention of a plan, as one line."""

from __future__ import annotations

from nsa_core.contract import Request


def _size(value: int | None) -> str:
    return "?" if value is None else str(value)


def describe_causal(longest: int) -> str:
    """Return one line about sel in sequences of at most ``longest`` tokens (Plan.causal_up_to)."""
    return f"up to n l' = {longest} tokens: causal, kernel of win, no select"


def describe_request(request: Request) -> str:
    """Return the request as one line: sizes under the contract's symbols, dtype, device, flags.

    A request of sel has the sizes that it depends on, any other one those of a layer.
    """
    g = request.geometry
    blocks = f"l'={g.select_block_size} n={g.num_selected_blocks}"
    if request.slot != "sel":
        blocks = f"l={g.compress_block_size} d={g.compress_stride} {blocks} w={g.window_size}"
    shape = (
        f"B={_size(request.batch)} S={_size(request.seq_len)} Hq={request.n_heads}"
        f" G={request.n_kv_heads} Dk={request.head_dim} Dv={request.v_head_dim} {blocks}"
    )
    device = request.device + (
        f" sm_{request.capability[0]}{request.capability[1]}" if request.capability else ""
    )
    conditions = {
        "gradients": request.needs_grad,
        "deterministic": request.deterministic,
        "packed": request.varlen,
        "queries inside a sequence": request.partial,
        f"pages of {request.page_size} tokens": request.page_size,
    }
    flags = [flag for flag, holds in conditions.items() if holds]
    return ", ".join([shape, f"{request.dtype} on {device}", request.phase, *flags])
