"""The plugin of the Triton backend: its slots and forms; imports neither torch nor triton."""

from __future__ import annotations

from nsa_core.contract import BackendSpec, SlotSpec, hookimpl

_HOME = "nsa_backend_triton"
MODULES = {
    "cmp": "span.cmp",
    "select": "select.forward",
    "sel": "sel.slot",
    "win": "span.win",
    "combine": "combine.kernels",
}

# Tokens of the long call of warm-up: more than every SHARE_ALL_MAX_LEN, so that sel runs its path
# over buckets, more blocks than the rows of select for short sequences take, and enough for every
# multiprocessor, so that win does not divide its heads.
LONG = 1 << 14


def _slot(
    name: str,
    *evidence: str,
    backward: bool = True,
    deterministic: bool = True,
    warmup_tokens: int = 128,
    partial: bool = False,
) -> SlotSpec:
    return SlotSpec(
        forward=f"{_HOME}.{MODULES[name]}:forward",
        backward=f"{_HOME}.{MODULES[name]}:backward" if backward else None,
        decode=None if name == "combine" else f"{_HOME}.decode.forms:{name}",
        evidence=evidence,
        workspace=f"{_HOME}.workspace:{name}",
        decode_workspace=None if name == "combine" else f"{_HOME}.workspace:{name}",
        deterministic=deterministic,
        warmup_tokens=warmup_tokens,
        partial=partial,
        quantized=True,
    )


@hookimpl
def nsa_register_backends() -> BackendSpec:
    """Register the backend ``triton``, which has Triton kernels for every slot."""
    return BackendSpec(
        name="triton",
        api_version=(1, 1),
        slots={
            "cmp": _slot(
                "cmp",
                "span_forward",
                "decode_span",
                partial=True,
            ),
            "select": _slot(
                "select",
                "select_forward",
                "decode_span",
                partial=True,
                backward=False,
                warmup_tokens=LONG,
            ),
            "sel": _slot(
                "sel",
                "sel_forward_kernel",
                "decode_sel",
                partial=True,
                deterministic=False,
                warmup_tokens=LONG,
            ),
            "win": _slot(
                "win",
                "span_forward",
                "decode_span",
                partial=True,
                warmup_tokens=LONG,
            ),
            "combine": _slot("combine", "combine_forward"),
        },
        probe=f"{_HOME}.probe:probe",
        fused={
            "step": f"{_HOME}.decode.forms:step",
            "append": f"{_HOME}.decode.append:append",
            "gates": f"{_HOME}.decode.gates:gates",
            "compress": f"{_HOME}.decode.compress:compress",
            "backward": f"{_HOME}.core.backward:backward",
        },
        fused_workspace={"backward": f"{_HOME}.workspace:core_backward"},
        detail=f"{_HOME}.probe:detail",
        judge_context=f"{_HOME}.strict.interpreter:judge_context",
        priority=30,
        summary="our own Triton kernels, for NVIDIA GPUs from sm_80 on",
    )
