"""Are a layer's parameter gradients right? In float64 against the oracle, and elsewhere by
replaying the shared graph.

Parameters sit outside the slots, so no low-precision verdict exists for them. What is checked
instead:
- float64: every gradient against the oracle's autograd, in units of what its terms sum to in
  absolute value;
- any dtype and backend: the gradients equal, bit for bit, those of the shared PyTorch graph fed
  with the gradients that left the slots (which are judged themselves).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from nsa_core.dispatch.plan import Plan
from nsa_core.layer.attention import nsa_attention
from nsa_core.layer.module import NSAttention
from nsa_verify import oracle
from nsa_verify.judge.tensor import Verdict, judge
from nsa_verify.oracle.phi import compressed_positions, token_positions

Tensors = dict[str, torch.Tensor]


def judge_layer(
    attn: NSAttention,  # in float64
    x: torch.Tensor,  # float64 [B, S, dim], packed [T, dim]
    do: torch.Tensor,  # of x's shape
    cu_seqlens: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> dict[str, Verdict]:
    """Verdicts on the output "y", on "x"'s gradient and on every parameter's, given the layer's own
    blocks.

    ``plan`` runs the layer's slots; None: the layer's own.
    """
    names, parameters = zip(*attn.named_parameters())
    leaf = x.detach().requires_grad_()
    y = attn(leaf, cu_seqlens, plan=plan)
    actual = dict(
        zip(("x", *names), torch.autograd.grad(y, [leaf, *parameters], do, materialize_grads=True))
    )
    golden, magnitude = _golden(attn, x, do, plan or attn.plan, cu_seqlens)
    verdicts = {"y": _judge(y, golden.pop("y"), magnitude["y"], grad=False)}
    for name, expected in golden.items():
        verdicts[name] = _judge(actual[name], expected, magnitude[name], grad=True)
    return verdicts


def _judge(
    actual: torch.Tensor, golden: torch.Tensor, magnitude: torch.Tensor, *, grad: bool
) -> Verdict:
    """Rows are tokens or output units: all axes but the last, and the only one of a vector."""
    flat = [
        t[:, None] if t.dim() == 1 else t.reshape(-1, t.shape[-1])
        for t in (actual, golden, magnitude)
    ]
    return judge(flat[0], flat[1], flat[1], flat[2], torch.float64, grad=grad)


def _golden(
    attn: NSAttention,
    x: torch.Tensor,
    do: torch.Tensor,
    plan: Plan,
    cu_seqlens: torch.Tensor | None,
) -> tuple[Tensors, Tensors]:
    """(gradients, magnitudes) by name, the output "y" among them."""
    state = {n: p.detach().clone().requires_grad_() for n, p in attn.named_parameters()}
    leaf = x.detach().requires_grad_()
    config, blocks = attn.config, _own_blocks(attn, x, plan, cu_seqlens)
    with_taps, gate = _tapped(state, x), "gate.0.weight" if config.gate == "mlp" else "gate.weight"
    tokens = torch.eye(x.numel() // x.shape[-1], dtype=x.dtype).reshape(*x.shape[:-1], -1)
    p = oracle.project(with_taps, torch.cat((leaf, tokens), -1), config, cu_seqlens=cu_seqlens)

    def attend(v: tuple[torch.Tensor, ...], v_cmp: torch.Tensor) -> torch.Tensor:
        three = (v[0], v[1], v[2])
        return oracle.attention(
            p.q,
            p.k,
            three,
            p.gates,
            config,
            k_cmp=p.k_cmp,
            v_cmp=v_cmp,
            cu_seqlens=cu_seqlens,
            blocks=blocks,
        ).flatten(-2)

    o = attend(p.v, p.v_cmp)
    y = o @ state["out.weight"].T
    wrt = {"x": leaf, **state, "qkv taps": with_taps["qkv.weight"], "gate taps": with_taps[gate]}
    wrt |= {
        "q": p.q,
        "k0": p.k[0],
        "k1": p.k[1],
        "k2": p.k[2],
        "k_cmp": p.k_cmp,
        "v_cmp": p.v_cmp,
        "gates": p.gates,
    }
    grads = dict(zip(wrt, torch.autograd.grad(y, list(wrt.values()), do, materialize_grads=True)))
    # [tokens, units]
    deltas = {n: grads.pop(f"{n} taps")[:, x.shape[-1] :].T for n in ("qkv", "gate")}
    with torch.no_grad():
        positive = attend(tuple(v.abs() for v in p.v), p.v_cmp.abs())
        found = {"y": positive @ state["out.weight"].abs().T}
        found["x"] = (
            deltas["qkv"].abs() @ state["qkv.weight"].abs()
            + deltas["gate"].abs() @ state[gate].abs()
        )
        found["out.weight"] = do.flatten(0, -2).abs().T @ o.flatten(0, -2).abs()
        found |= _of_linears(state, x, p, deltas, grads["gates"], gate)
        found |= _of_norms(state, x, p, grads, attn, cu_seqlens) if config.qk_norm else {}
    found |= _of_phi(state, p, grads, attn, cu_seqlens)
    return {"y": y.detach(), "x": grads["x"], **{n: grads[n] for n in state}}, found


def _own_blocks(
    attn: NSAttention, x: torch.Tensor, plan: Plan, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    with torch.no_grad():
        p = attn.project(x, cu_seqlens)
        _, lse = plan.cmp(p.q, p.k_cmp, p.v_cmp, cu_seqlens=cu_seqlens)
        blocks: torch.Tensor = plan.select(p.q, p.k_cmp, lse, cu_seqlens=cu_seqlens)
    return blocks


def _tapped(state: Tensors, x: torch.Tensor) -> Tensors:
    """Weights that read x get a zero column per token: with a one-hot of the token appended to x,
    the column's gradient is that token's delta, and nothing else changes.
    """
    rows = x.numel() // x.shape[-1]
    tapped = dict(state)
    for name in ("qkv.weight", "gate.weight", "gate.0.weight"):
        if name in state:
            tapped[name] = torch.cat(
                (state[name], state[name].new_zeros(state[name].shape[0], rows)), 1
            )
    return tapped


def _of_linears(
    state: Tensors,
    x: torch.Tensor,
    p: oracle.Projected,
    deltas: Tensors,
    dgates: torch.Tensor,
    gate: str,
) -> Tensors:
    """|delta|^T |x| of the weights that read x and of the gates' second layer; sum |delta| of the
    biases.
    """
    rows = x.flatten(0, -2)
    found = {
        "qkv.weight": deltas["qkv"].abs().T @ rows.abs(),
        gate: deltas["gate"].abs().T @ rows.abs(),
    }
    found[gate.replace("weight", "bias")] = deltas["gate"].abs().sum(0)
    if gate == "gate.0.weight":
        logits = (dgates * p.gates * (1 - p.gates)).flatten(-2).flatten(0, -2)
        hidden = torch.nn.functional.silu(rows @ state[gate].T + state["gate.0.bias"])
        found |= {
            "gate.2.weight": logits.abs().T @ hidden.abs(),
            "gate.2.bias": logits.abs().sum(0),
        }
    return found


def _of_norms(
    state: Tensors,
    x: torch.Tensor,
    p: oracle.Projected,
    grads: Tensors,
    attn: NSAttention,
    cu_seqlens: torch.Tensor | None,
) -> Tensors:
    """sum |delta| |x / rms(x)| of the head norms; rotated deltas are turned back first."""
    config, width = attn.config, attn.config.qk_dim
    flat = x @ state["qkv.weight"].T
    queries = config.n_heads * width
    keys = flat[..., queries:].unflatten(-1, (-1, 1))[
        ..., : (3 - 2 * config.shared_kv) * config.n_kv_heads * width, 0
    ]
    at = token_positions(x.shape[-2], cu_seqlens)

    def back(name: str, rotated: bool) -> torch.Tensor:
        return (
            oracle.rope(grads[name], -at, config.rope_base)
            if config.rope and rotated
            else grads[name]
        )

    def magnitude(raw: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        scaled = raw / (raw.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return (delta * scaled).abs().flatten(0, -2).sum(0)

    raw = keys.unflatten(-1, (-1, config.n_kv_heads, width)).unbind(-3)
    of_keys = zip(
        raw * (3 // len(raw)),
        (back("k0", config.rope_before_compress), back("k1", True), back("k2", True)),
    )
    return {
        "q_norm.weight": magnitude(flat[..., :queries].unflatten(-1, (-1, width)), back("q", True)),
        "k_norm.weight": torch.stack([magnitude(*pair) for pair in of_keys]).sum(0),
    }


def _of_phi(
    state: Tensors,
    p: oracle.Projected,
    grads: Tensors,
    attn: NSAttention,
    cu_seqlens: torch.Tensor | None,
) -> Tensors:
    """Per parameter of phi the sum of |gradient| over single blocks of single heads: |delta|^T |x|
    and sum |delta|.
    """
    config, dk_cmp = attn.config, grads["k_cmp"]
    if config.rope and not config.rope_before_compress:
        at = compressed_positions(p.q.shape[-3], config.geometry, cu_seqlens)
        dk_cmp = oracle.rope(dk_cmp, -at, config.rope_base)
    found: Tensors = {}
    for prefix, raw, delta in (("phi_k.", p.k[0], dk_cmp), ("phi_v.", p.v[0], grads["v_cmp"])):
        params = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        totals = {prefix + n: torch.zeros_like(t) for n, t in params.items()}
        for block, of_block in _blocks(raw.detach(), delta, attn, cu_seqlens) if params else ():
            out = oracle.compress(config.compress, params, block[None, :, None], config.geometry)
            single = torch.autograd.grad(out[0, 0, 0], list(params.values()), of_block)
            for total, term in zip(totals.values(), single):
                total += term.abs()
        found |= totals
    return found


def _blocks(
    raw: torch.Tensor, delta: torch.Tensor, attn: NSAttention, cu_seqlens: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens [l, D], gradient [D]) of every compressed token of every head."""
    geometry, row = attn.config.geometry, 0
    bounds = None if cu_seqlens is None else [int(b) for b in cu_seqlens]
    spans = list(raw) if bounds is None else [raw[a:b] for a, b in itertools.pairwise(bounds)]
    for entry, span in enumerate(spans):
        starts = range(
            0, span.shape[0] - geometry.compress_block_size + 1, geometry.compress_stride
        )
        of_span = delta[entry] if bounds is None else delta[row : row + len(starts)]
        row += len(starts)
        for start, of_block in zip(starts, of_span):
            for head in range(span.shape[1]):
                yield span[start : start + geometry.compress_block_size, head], of_block[head]


def replayed(
    attn: NSAttention, x: torch.Tensor, do: torch.Tensor, cu_seqlens: torch.Tensor | None = None
) -> tuple[Tensors, Tensors]:
    """Parameter gradients of the layer (its own, and replayed): those of the projections, phi and
    gates, fed with the gradients that left nsa_attention. Equal bit for bit under deterministic
    algorithms.
    """
    parameters = dict(attn.named_parameters())

    def grads_of(run: Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]) -> Tensors:
        outputs, given = run()
        found = torch.autograd.grad(outputs, list(parameters.values()), given, allow_unused=True)
        return {n: g for n, g in zip(parameters, found) if g is not None}

    own = grads_of(lambda: ([attn(x, cu_seqlens)], [do]))
    p, gates = attn.project(x, cu_seqlens), attn.gate(x)
    sources = [p.q, p.k[1], p.k[2], p.v[1], p.v[2], p.k_cmp, p.v_cmp, gates]
    q, k1, k2, v1, v2, k_cmp, v_cmp, g = leaves = [s.detach().requires_grad_() for s in sources]
    o = nsa_attention(
        q,
        (None, k1, k2),
        (None, v1, v2),
        g,
        config=attn.config,
        k_cmp=k_cmp,
        v_cmp=v_cmp,
        cu_seqlens=cu_seqlens,
    )
    y = attn.out(o.flatten(-2))
    *leaving, of_out = torch.autograd.grad(y, [*leaves, attn.out.weight], do)
    return own, {**grads_of(lambda: (sources, leaving)), "out.weight": of_out}
