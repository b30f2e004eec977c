"""Observe which keys a kernel reads, with equal logits and one-hot values."""

from __future__ import annotations

import torch

from nsa_core.layout import BlockGeometry
from nsa_core.plan.registry import default_registry
from nsa_core.torch_ops.kernel import Kernel
from nsa_core.torch_ops.slot_op import slot_op

Sets = list[list[list[list[int]]]]  # [B][S][G] -> keys, ascending


def slot_kernel(backend: str, slot: str, geometry: BlockGeometry, scale: float = 1.0) -> Kernel:
    """Return the operator of a slot without asking the probe of the backend."""
    spec = default_registry().get(backend).spec
    assert spec is not None
    return Kernel(
        backend,
        slot,
        slot_op(backend, slot, spec.slots[slot]).op,
        scale,
        tuple(geometry.as_ints()),
        False,
    )


def keys_read(
    kernel: Kernel,
    shape: tuple[int, int, int, int],  # B, S, G, h
    n_keys: int,
    *blocks: torch.Tensor,  # [B, S, G, n]
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    width: int = 16,
) -> Sets:
    """Return the keys in the softmax of every query.

    With q = 0 all logits are equal, so every key has the weight 1 / (number of keys), and exp(LSE)
    is the number of keys. Value j is the j-th unit vector, so o * exp(LSE) counts each key.

    Args:
        kernel: Operator of cmp, sel or win.
        shape: (B, S, G, h).
        n_keys: Number of keys.
        *blocks: Blocks [B, S, G, n] of sel.
        dtype: Dtype of q, k and v.
        device: Device of the tensors.
        width: Head dimension of q and k.

    Raises:
        AssertionError: A key counts twice or in part, or heads of one group read different keys.
    """
    batch, length, groups, heads = shape
    q = torch.zeros(batch, length, groups * heads, width, dtype=dtype, device=device)
    k = torch.randn(batch, n_keys, groups, width, device=device).to(dtype)
    values = (
        torch.eye(n_keys, dtype=dtype, device=device)[None, :, None]
        .expand(batch, -1, groups, -1)
        .contiguous()
    )
    o, lse = kernel(q, k, values, *(b.to(device) for b in blocks))
    counts = o.double() * lse.double().exp().transpose(1, 2)[..., None]  # [B, S, Hq, n_keys]
    counts = counts.cpu().unflatten(2, (groups, heads))
    assert (counts - counts.round()).abs().max() < 0.05 if counts.numel() else True, (
        "a key counts in part"
    )
    assert counts.round().max() <= 1 if counts.numel() else True, "a key counts twice"
    read = counts > 0.5
    assert bool((read == read[:, :, :, :1]).all()), "heads of one group read different keys"
    return [
        [[row.nonzero().flatten().tolist() for row in token[:, 0]] for token in entry]
        for entry in read
    ]


def ranges(keys: list[int]) -> list[tuple[int, int]]:
    """Return the maximal ranges [first, last + 1) of ascending keys."""
    merged: list[tuple[int, int]] = []
    for key in keys:
        if merged and merged[-1][1] == key:
            merged[-1] = (merged[-1][0], key + 1)
        else:
            merged.append((key, key + 1))
    return merged
