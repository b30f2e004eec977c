"""The specification of the backend ``fa2``. Imports neither torch nor flash-attn."""

from __future__ import annotations

from nsa_core.contract import BackendSpec, SlotSpec, hookimpl

_PACKAGE = "nsa_backend_fa2"


def _slot(name: str) -> SlotSpec:
    return SlotSpec(
        forward=f"{_PACKAGE}.{name}:forward",
        backward=f"{_PACKAGE}.{name}:backward",
        decode=f"{_PACKAGE}.decode:cmp" if name == "cmp" else None,
        evidence=("flash_fwd", "flash_bwd"),
        workspace=f"{_PACKAGE}.workspace:{name}",
        # At strides of up to 64, cmp then has the rows from which FlashAttention-4 runs it.
        warmup_tokens=16512 if name == "cmp" else SlotSpec.warmup_tokens,
        deterministic=False,  # the backward adds to dq with atomics, unless SlotCall.deterministic
        partial=True,
        reads_lse=name == "cmp",
    )


@hookimpl
def nsa_register_backends() -> BackendSpec:
    """Return the backend ``fa2``: FlashAttention-2 for the three attention branches."""
    return BackendSpec(
        name="fa2",
        api_version=(1, 1),
        slots={name: _slot(name) for name in ("cmp", "sel", "win")},
        probe=f"{_PACKAGE}.probe:probe",
        rank=f"{_PACKAGE}.rank:rank",
        summary="FlashAttention-2, from the flash-attn package or PyTorch's own",
        detail=f"{_PACKAGE}.probe:detail",
    )
