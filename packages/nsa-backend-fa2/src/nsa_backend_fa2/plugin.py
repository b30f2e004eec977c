"""What this backend offers, without importing torch or flash-attn."""

from __future__ import annotations

from nsa_core.contract import BackendSpec, SlotSpec, hookimpl

_HOME = "nsa_backend_fa2"


def _slot(name: str) -> SlotSpec:
    return SlotSpec(
        forward=f"{_HOME}.{name}:forward",
        backward=f"{_HOME}.{name}:backward",
        decode=f"{_HOME}.decode:cmp" if name == "cmp" else None,
        evidence=("flash_fwd", "flash_bwd"),
        workspace=f"{_HOME}.workspace:{name}",
        deterministic=False,  # the backward adds dq with atomics unless the call asks it not to
    )


@hookimpl
def nsa_register_backends() -> BackendSpec:
    """The backend ``fa2``: FlashAttention-2 for the three attention branches."""
    return BackendSpec(
        name="fa2",
        api_version=(1, 0),
        slots={name: _slot(name) for name in ("cmp", "sel", "win")},
        probe=f"{_HOME}.probe:probe",
        priority=20,
        slot_priority={"sel": -10},  # one attention call per token and group: right, and slow
        summary="FlashAttention-2, from the flash-attn package or PyTorch's own",
        detail=f"{_HOME}.probe:detail",
    )
