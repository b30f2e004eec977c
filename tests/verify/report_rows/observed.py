"""Which keys a kernel reads, seen from outside: equal logits, and values that name their key."""

from __future__ import annotations

import torch

from nsa_core.dispatch.registry import default_registry
from nsa_core.layout import BlockGeometry
from nsa_core.torch_ops.slot_op import Kernel, slot_op

Sets = list[list[list[list[int]]]]  # [B][S][G] -> keys, ascending


def slot_kernel(backend: str, slot: str, geometry: BlockGeometry, scale: float = 1.0) -> Kernel:
    """The operator of a backend's slot, whatever its probe says of this machine."""
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
    *blocks: torch.Tensor,  # of sel: [B, S, G, any number]
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    width: int = 16,
) -> Sets:
    """The keys that every query's softmax holds.

    With q = 0 all logits are equal, so p = 1 / (keys read), each as often as it was read; value j
    is the j-th unit vector. LSE is then the logarithm of how many were read, and o times that
    counts how often each was.

    Raises:
        AssertionError: a key counts twice or in part, or heads of one group read different keys.
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
    seen = counts > 0.5
    assert bool((seen == seen[:, :, :, :1]).all()), "heads of one group read different keys"
    return [
        [[row.nonzero().flatten().tolist() for row in token[:, 0]] for token in entry]
        for entry in seen
    ]


def ranges(keys: list[int]) -> list[tuple[int, int]]:
    """Maximal runs [first, past the last) of ascending keys."""
    found: list[tuple[int, int]] = []
    for key in keys:
        if found and found[-1][1] == key:
            found[-1] = (found[-1][0], key + 1)
        else:
            found.append((key, key + 1))
    return found
