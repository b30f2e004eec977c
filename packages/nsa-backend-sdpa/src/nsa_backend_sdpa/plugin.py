"""What this backend offers, without importing torch."""

from __future__ import annotations

from nsa_core.contract import BackendSpec, SlotSpec, hookimpl

_HOME = "nsa_backend_sdpa"


def _slot(name: str, *evidence: str, backward: bool = True, deterministic: bool = True) -> SlotSpec:
    return SlotSpec(
        forward=f"{_HOME}.{name}:forward",
        backward=f"{_HOME}.{name}:backward" if backward else None,
        decode=None if name == "combine" else f"{_HOME}.decode:{name}",
        evidence=evidence,
        workspace=f"{_HOME}.workspace:{name}",
        deterministic=deterministic,
        reads_boundaries=name == "cmp",
    )


@hookimpl
def nsa_register_backends() -> BackendSpec:
    """The backend ``sdpa``: the floor of `auto`, there wherever PyTorch is."""
    return BackendSpec(
        name="sdpa",
        api_version=(1, 0),
        slots={
            # cuDNN's and PyTorch's flash backward use atomics; asked for determinism, cmp takes the
            # block engine.
            "cmp": _slot("cmp", "nsa_sdpa.cmp", deterministic=False),
            "select": _slot("select", "nsa_sdpa.select", backward=False),
            "sel": _slot("sel", "nsa_sdpa.sel"),
            "win": _slot("win", "nsa_sdpa.win"),
            "combine": _slot("combine", "nsa_sdpa.combine"),
        },
        probe=f"{_HOME}.probe:probe",
        priority=0,
        rank=f"{_HOME}.probe:rank",
        summary="plain PyTorch, CPU and any GPU",
    )
