"""The specification of the backend ``sdpa``. Imports no torch."""

from __future__ import annotations

from nsa_core.contract import BackendSpec, SlotSpec, hookimpl

_PACKAGE = "nsa_backend_sdpa"


def _slot(name: str, *evidence: str, backward: bool = True, deterministic: bool = True) -> SlotSpec:
    return SlotSpec(
        forward=f"{_PACKAGE}.{name}:forward",
        backward=f"{_PACKAGE}.{name}:backward" if backward else None,
        decode=None if name == "combine" else f"{_PACKAGE}.decode:{name}",
        evidence=evidence,
        workspace=f"{_PACKAGE}.workspace:{name}",
        deterministic=deterministic,
        reads_boundaries=name == "cmp",
        partial=name != "combine",
        quantized=True,
    )


@hookimpl
def nsa_register_backends() -> BackendSpec:
    """Return the backend ``sdpa``, which gives `auto` a candidate wherever PyTorch runs."""
    return BackendSpec(
        name="sdpa",
        api_version=(1, 1),
        slots={
            # The backwards of cuDNN and FlashAttention-2 use atomics. A deterministic request of
            # cmp runs on the tiles of engine.py instead.
            "cmp": _slot("cmp", "nsa_sdpa.cmp", deterministic=False),
            "select": _slot("select", "nsa_sdpa.select", backward=False),
            "sel": _slot("sel", "nsa_sdpa.sel"),
            "win": _slot("win", "nsa_sdpa.win"),
            "combine": _slot("combine", "nsa_sdpa.combine"),
        },
        probe=f"{_PACKAGE}.probe:probe",
        priority=0,
        rank=f"{_PACKAGE}.probe:rank",
        summary="plain PyTorch, CPU and CUDA GPUs",
    )
