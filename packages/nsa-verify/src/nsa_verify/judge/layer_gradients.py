"""Judge the parameter gradients of a layer in float64, by the autograd of the oracle.

Parameters are outside the slots, so they have no low-precision verdict. The magnitude is the sum
of the absolute values of the terms of the gradient. In other dtypes the slot gradients are judged,
and tests/core/layer/test_parameters.py replays the shared PyTorch graph with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from nsa_core.layer.module import NSAttention
from nsa_core.plan.plan import Plan
from nsa_verify import oracle
from nsa_verify.judge.tensor import Verdict, judge
from nsa_verify.oracle.phi import compressed_positions, token_positions

Tensors = dict[str, torch.Tensor]


def run_layer(
    attn: NSAttention,
    x: torch.Tensor,
    do: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> Tensors:
    """Return the output "y" of a layer and its gradients by name.

    Args:
        attn: The layer.
        x: Input [B, S, dim], packed [T, dim].
        do: Gradient of the layer's output, in the shape of ``x``.
        cu_seqlens: Document bounds, int32 [documents + 1]; None if dense.
        plan: Plan that runs the slots; None uses the layer's own.
    """
    names, parameters = zip(*attn.named_parameters())
    leaf = x.detach().requires_grad_()
    y = attn(leaf, cu_seqlens, plan=plan)
    grads = torch.autograd.grad(y, [leaf, *parameters], do, materialize_grads=True)
    return {"y": y.detach(), **dict(zip(("x", *names), grads))}


def judge_results(actual: Tensors, golden: Tensors, magnitude: Tensors) -> dict[str, Verdict]:
    """Judge the results of :func:`run_layer` by those of :func:`golden_layer`."""
    return {
        name: _judge(actual[name], expected, magnitude[name], grad=name != "y")
        for name, expected in golden.items()
    }


def _judge(
    actual: torch.Tensor, golden: torch.Tensor, magnitude: torch.Tensor, *, grad: bool
) -> Verdict:
    """Judge with tokens or output units as rows; a vector has one element per row."""
    flat = [
        t[:, None] if t.dim() == 1 else t.reshape(-1, t.shape[-1])
        for t in (actual, golden, magnitude)
    ]
    return judge(flat[0], flat[1], flat[1], flat[2], torch.float64, grad=grad)


def golden_layer(
    attn: NSAttention,  # in float64
    x: torch.Tensor,  # float64 [B, S, dim], packed [T, dim]
    do: torch.Tensor,  # of x's shape
    plan: Plan,
    cu_seqlens: torch.Tensor | None,
) -> tuple[Tensors, Tensors]:
    """Compute the output and the gradients of a layer by the oracle, with their magnitudes.

    The layer is in float64; the blocks are those that it selects with ``plan``. The arguments are
    those of :func:`run_layer`.

    Returns:
        (golden results, magnitudes), each by name: the output "y", the gradient of "x", and the
        gradient of every parameter.
    """
    state = {n: p.detach().clone().requires_grad_() for n, p in attn.named_parameters()}
    leaf = x.detach().requires_grad_()
    config, blocks = attn.config, _own_blocks(attn, x, plan, cu_seqlens)
    tapped, gate = _tapped(state, x), "gate.0.weight" if config.gate == "mlp" else "gate.weight"
    one_hot = torch.eye(x.numel() // x.shape[-1], dtype=x.dtype).reshape(*x.shape[:-1], -1)
    p = oracle.project(tapped, torch.cat((leaf, one_hot), -1), config, cu_seqlens=cu_seqlens)

    def attend(v: tuple[torch.Tensor, ...], v_cmp: torch.Tensor) -> torch.Tensor:
        values = (v[0], v[1], v[2])
        return oracle.attention(
            p.q,
            p.k,
            values,
            p.gates,
            config,
            k_cmp=p.k_cmp,
            v_cmp=v_cmp,
            cu_seqlens=cu_seqlens,
            blocks=blocks,
        ).flatten(-2)

    o = attend(p.v, p.v_cmp)
    y = o @ state["out.weight"].T
    sources = {"x": leaf, **state, "qkv probe": tapped["qkv.weight"], "gate probe": tapped[gate]}
    sources |= {
        "q": p.q,
        "k0": p.k[0],
        "k1": p.k[1],
        "k2": p.k[2],
        "k_cmp": p.k_cmp,
        "v_cmp": p.v_cmp,
        "gates": p.gates,
    }
    grads = dict(
        zip(sources, torch.autograd.grad(y, list(sources.values()), do, materialize_grads=True))
    )
    # [tokens, units]
    deltas = {n: grads.pop(f"{n} probe")[:, x.shape[-1] :].T for n in ("qkv", "gate")}
    with torch.no_grad():
        positive = attend(tuple(v.abs() for v in p.v), p.v_cmp.abs())
        magnitudes = {"y": positive @ state["out.weight"].abs().T}
        magnitudes["x"] = (
            deltas["qkv"].abs() @ state["qkv.weight"].abs()
            + deltas["gate"].abs() @ state[gate].abs()
        )
        magnitudes["out.weight"] = do.flatten(0, -2).abs().T @ o.flatten(0, -2).abs()
        magnitudes |= _linear_magnitudes(state, x, p, deltas, grads["gates"], gate)
        magnitudes |= (
            _norm_magnitudes(state, x, p, grads, attn, cu_seqlens) if config.qk_norm else {}
        )
    magnitudes |= _phi_magnitudes(state, p, grads, attn, cu_seqlens)
    return {"y": y.detach(), "x": grads["x"], **{n: grads[n] for n in state}}, magnitudes


def _own_blocks(
    attn: NSAttention, x: torch.Tensor, plan: Plan, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Return the blocks that the layer selects with the slots of ``plan``."""
    with torch.no_grad():
        p = attn.project(x, cu_seqlens)
        _, lse = plan.cmp(p.q, p.k_cmp, p.v_cmp, cu_seqlens=cu_seqlens)
        blocks: torch.Tensor = plan.select(p.q, p.k_cmp, lse, cu_seqlens=cu_seqlens)
    return blocks


def _tapped(state: Tensors, x: torch.Tensor) -> Tensors:
    """Append one zero column per token to the weights that multiply x.

    With a one-hot vector of the token appended to x, the gradient of a column is the delta of that
    token. Nothing else changes.
    """
    tokens = x.numel() // x.shape[-1]
    tapped = dict(state)
    for name in ("qkv.weight", "gate.weight", "gate.0.weight"):
        if name in state:
            tapped[name] = torch.cat(
                (state[name], state[name].new_zeros(state[name].shape[0], tokens)), 1
            )
    return tapped


def _linear_magnitudes(
    state: Tensors,
    x: torch.Tensor,
    p: oracle.Projected,
    deltas: Tensors,
    dgates: torch.Tensor,
    gate: str,
) -> Tensors:
    """Return |delta|^T |x| for the input weights and gate.2, and sum |delta| for the biases."""
    rows = x.flatten(0, -2)
    magnitudes = {
        "qkv.weight": deltas["qkv"].abs().T @ rows.abs(),
        gate: deltas["gate"].abs().T @ rows.abs(),
    }
    magnitudes[gate.replace("weight", "bias")] = deltas["gate"].abs().sum(0)
    if gate == "gate.0.weight":
        dlogits = (dgates * p.gates * (1 - p.gates)).flatten(-2).flatten(0, -2)
        hidden = torch.nn.functional.silu(rows @ state[gate].T + state["gate.0.bias"])
        magnitudes |= {
            "gate.2.weight": dlogits.abs().T @ hidden.abs(),
            "gate.2.bias": dlogits.abs().sum(0),
        }
    return magnitudes


def _norm_magnitudes(
    state: Tensors,
    x: torch.Tensor,
    p: oracle.Projected,
    grads: Tensors,
    attn: NSAttention,
    cu_seqlens: torch.Tensor | None,
) -> Tensors:
    """Return sum |delta| |x / rms(x)| of the head norms, with the rotary embedding undone."""
    config, width = attn.config, attn.config.qk_dim
    flat = x @ state["qkv.weight"].T
    queries = config.n_heads * width
    keys = flat[..., queries:].unflatten(-1, (-1, 1))[
        ..., : (3 - 2 * config.shared_kv) * config.n_kv_heads * width, 0
    ]
    positions = token_positions(x.shape[-2], cu_seqlens)

    def unrotated(name: str, rotated: bool) -> torch.Tensor:
        return (
            oracle.rope(grads[name], -positions, config.frequencies)
            if config.rope and rotated
            else grads[name]
        )

    def magnitude(raw: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        scaled = raw / (raw.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return (delta * scaled).abs().flatten(0, -2).sum(0)

    raw = keys.unflatten(-1, (-1, config.n_kv_heads, width)).unbind(-3)
    key_pairs = zip(
        raw * (3 // len(raw)),
        (
            unrotated("k0", config.rope_before_compress),
            unrotated("k1", True),
            unrotated("k2", True),
        ),
    )
    return {
        "q_norm.weight": magnitude(
            flat[..., :queries].unflatten(-1, (-1, width)), unrotated("q", True)
        ),
        "k_norm.weight": torch.stack([magnitude(*pair) for pair in key_pairs]).sum(0),
    }


def _phi_magnitudes(
    state: Tensors,
    p: oracle.Projected,
    grads: Tensors,
    attn: NSAttention,
    cu_seqlens: torch.Tensor | None,
) -> Tensors:
    """Sum |gradient| over the blocks and heads for each parameter of phi.

    These are the terms |delta|^T |x| of weights and sum |delta| of biases.
    """
    config, dk_cmp = attn.config, grads["k_cmp"]
    if config.rope and not config.rope_before_compress:
        positions = compressed_positions(p.q.shape[-3], config.geometry, cu_seqlens)
        dk_cmp = oracle.rope(dk_cmp, -positions, config.frequencies)
    magnitudes: Tensors = {}
    for prefix, raw, delta in (("phi_k.", p.k[0], dk_cmp), ("phi_v.", p.v[0], grads["v_cmp"])):
        params = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        totals = {prefix + n: torch.zeros_like(t) for n, t in params.items()}
        for block, block_grad in _blocks(raw.detach(), delta, attn, cu_seqlens) if params else ():
            out = oracle.compress(config.compress, params, block[None, :, None], config.geometry)
            terms = torch.autograd.grad(out[0, 0, 0], list(params.values()), block_grad)
            for total, term in zip(totals.values(), terms):
                total += term.abs()
        magnitudes |= totals
    return magnitudes


def _blocks(
    raw: torch.Tensor, delta: torch.Tensor, attn: NSAttention, cu_seqlens: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tokens [l, D], gradient [D]) of every compressed token and head."""
    geometry, row = attn.config.geometry, 0
    bounds = None if cu_seqlens is None else [int(b) for b in cu_seqlens]
    spans = list(raw) if bounds is None else [raw[a:b] for a, b in itertools.pairwise(bounds)]
    for entry, span in enumerate(spans):
        starts = range(
            0, span.shape[0] - geometry.compress_block_size + 1, geometry.compress_stride
        )
        span_grad = delta[entry] if bounds is None else delta[row : row + len(starts)]
        row += len(starts)
        for start, block_grad in zip(starts, span_grad):
            for head in range(span.shape[1]):
                yield span[start : start + geometry.compress_block_size, head], block_grad[head]
