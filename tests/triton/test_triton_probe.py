"""The Triton backend's probe: every reason and its code, for requests that describe a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch

from nsa_core import BlockGeometry, Unsupported, resolve
from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS
from slot_requests import make_request

pytest.importorskip("triton")
from nsa_backend_triton import probe as probing
from nsa_backend_triton.host import configs

BASE = make_request("combine", 4096)


def codes(**fields: Any) -> list[str]:
    reasons = probing.probe(dataclasses.replace(BASE, **fields))
    assert all(reason.message and reason.hint for reason in reasons)
    return [reason.code for reason in reasons]


@pytest.mark.parametrize(
    "capability", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
)
def test_row_49_supported_gpus_are_accepted(capability: tuple[int, int]) -> None:
    assert codes(capability=capability) == []


@pytest.mark.parametrize(
    ("capability", "code", "numbers"),
    [
        ((7, 5), "sm_too_old", ("sm_80", "sm_75")),
        ((13, 0), "sm_too_new", ("sm_121", "sm_130")),
        ((11, 0), "sm_unknown", ("sm_110", "sm_90")),
    ],
)
def test_row_49_refusal_of_other_gpus_names_both_numbers(
    capability: Any, code: str, numbers: tuple[str, ...]
) -> None:
    (reason,) = probing.probe(dataclasses.replace(BASE, capability=capability))
    assert reason.code == code
    assert all(number in reason.message for number in numbers)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"device": "cpu", "capability": None}, "device"),
        ({"capability": None}, "no_gpu"),
        ({"dtype": "float64"}, "dtype"),
        ({"v_head_dim": 257}, "head_dim"),
        ({"slot": "win", "head_dim": 257}, "head_dim"),
        ({"slot": "win", "n_heads": 65, "n_kv_heads": 1}, "too_many_heads"),
        ({"slot": "sel", "geometry": BlockGeometry(8, 8, 8)}, "select_block_size"),
        ({"slot": "select", "geometry": BlockGeometry(select_block_size=144)}, "select_block_size"),
        ({"slot": "sel", "geometry": BlockGeometry(select_block_size=272)}, "select_block_size"),
        (
            {"slot": "select", "geometry": BlockGeometry(num_selected_blocks=65)},
            "num_selected_blocks",
        ),
        (
            {"slot": "sel", "geometry": BlockGeometry(num_selected_blocks=513)},
            "num_selected_blocks",
        ),
        (
            {
                "slot": "sel",
                "geometry": BlockGeometry(num_selected_blocks=512),
                "batch": 2,
                "seq_len": 2**20,
            },
            "too_many_pairs",
        ),
    ],
)
def test_unsupported_request_is_refused(fields: dict[str, Any], code: str) -> None:
    assert code in codes(**fields)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0)])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("heads", [1, 4, 16, 64])
def test_sel_takes_blocks_of_256(heads: int, phase: str, capability: tuple[int, int]) -> None:
    sizes = {"n_heads": heads, "n_kv_heads": 1, "head_dim": 128, "v_head_dim": 128}
    geometry = BlockGeometry(256, 256, 256, 256)
    call = {"slot": "sel", "geometry": geometry, "phase": phase, "needs_grad": phase == "prefill"}
    assert codes(**call | sizes, capability=capability) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"seq_len": 2**20},
        {"needs_grad": False},
        {"varlen": True, "batch": 100, "seq_len": 2**20},
        {"seq_len": None, "batch": None},
        {"phase": "decode", "needs_grad": False, "page_size": 128},
    ],
)
def test_sel_takes_lists_of_512_blocks(fields: dict[str, Any]) -> None:
    geometry = BlockGeometry(128, 128, 128, 512)
    many = {"slot": "sel", "geometry": geometry, "batch": 1, "seq_len": 2**21 - 1, "n_kv_heads": 2}
    assert codes(**many | fields) == []


@pytest.mark.parametrize(("stride", "refused"), [(16, []), (1, ["no_configuration"])])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_row_46_tiles_of_whole_blocks_beyond_shared_memory_are_refused(
    phase: str, stride: int, refused: list[str]
) -> None:
    """A tile of scores holds whole selection blocks, here of 8 or 128 compressed tokens."""
    wide = {
        "slot": "select",
        "head_dim": 256,
        "v_head_dim": 256,
        "capability": (8, 6),
        "needs_grad": False,
    }
    assert codes(**wide, phase=phase, geometry=BlockGeometry(16, stride, 128)) == refused
    assert (
        codes(**wide | {"capability": (9, 0)}, phase=phase, geometry=BlockGeometry(16, stride, 128))
        == []
    )


def test_probe_returns_all_reasons() -> None:
    fields = {"slot": "sel", "capability": (7, 0), "dtype": "float64", "head_dim": 300}
    assert {"sm_too_old", "dtype", "head_dim"} <= set(codes(**fields))


def test_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert codes() == ["rocm"]


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("3.3.1", False), ("2.0", False), ("3.4.0", True), ("3.10.0+git", True)],
)
def test_oldest_triton_version(
    version: str, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "_version", version)
    assert codes() == ([] if accepted else ["triton_too_old"])


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
@pytest.mark.parametrize("slot", SLOTS)
def test_decode_is_accepted_on_every_supported_gpu(slot: str, capability: tuple[int, int]) -> None:
    fields = {
        "slot": slot,
        "phase": "decode",
        "needs_grad": False,
        "page_size": 128,
        "capability": capability,
    }
    for dtype, width in itertools.product(("bfloat16", "float32"), (32, 96, 256)):
        assert codes(**fields, dtype=dtype, head_dim=width, v_head_dim=width) == []
    assert "head_dim" in codes(**fields, v_head_dim=257)


@pytest.mark.parametrize("slot", SLOTS)
def test_decode_without_a_configuration_is_refused(
    slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        configs, "table", lambda _: {configs.DECODE[slot][0]: [({"v_head_dim": 32}, {})]}
    )
    assert set(codes(slot=slot, phase="decode", needs_grad=False)) == {"no_configuration"}


@pytest.mark.parametrize("slot", SLOTS)
def test_row_46_request_without_a_configuration_is_refused(
    slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert codes(slot=slot) == []
    kernel = configs.FORWARD[slot][0]
    monkeypatch.setattr(configs, "table", lambda _: {kernel: [({"v_head_dim": 32}, {})]})
    assert set(codes(slot=slot, needs_grad=False)) == {"no_configuration"}


def test_every_table_has_every_kernel() -> None:
    tables = (configs.FORWARD, configs.BACKWARD, configs.DECODE)
    kernels = {kernel for of in tables for slot in SLOTS for kernel in of[slot]}
    for architecture in configs.TABLES:
        assert set(configs.table(architecture)) == kernels, architecture


def test_row_28_refusal_of_cpu_tensors_names_the_device() -> None:
    config = NSAConfig(dim=64, n_heads=4, n_kv_heads=2, head_dim=16)
    with pytest.raises(Unsupported, match=r"triton [\d.]+: not supported: needs cuda, got cpu"):
        resolve(config, device="cpu", backends="triton")


def test_probe_reports_missing_triton_without_importing_torch() -> None:
    code = """
import sys
sys.modules["triton"] = None
import nsa_backend_triton.plugin
from nsa_backend_triton.probe import detail, probe
from nsa_core import BlockGeometry, Request
sizes = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "v_head_dim": 64}
request = Request(slot="win", geometry=BlockGeometry(), **sizes)
print([reason.code for reason in probe(request)], detail())
assert "torch" not in sys.modules
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("['triton_missing', 'device']")
    assert "pip install triton" in result.stdout


def test_detail_begins_with_the_version() -> None:
    assert probing.detail()[0].startswith("triton ")


@pytest.mark.slow
def test_importing_the_kernels_creates_no_cuda_context() -> None:
    code = (
        "import torch, nsa_backend_triton.combine.kernels, nsa_backend_triton.probe as p;"
        " p.detail\n"
    )
    code += "assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_warmup_length_reaches_the_bucket_path_of_sel() -> None:
    from nsa_backend_triton.plugin import nsa_register_backends

    tokens = nsa_register_backends().slots["sel"].warmup_tokens
    rows = [settings for a in configs.TABLES for _, settings in configs.table(a)["sel_forward"]]
    assert max(row["SHARE_ALL_MAX_LEN"] for row in rows) < tokens


def test_rows_of_short_sequences_are_warmed_and_never_needed() -> None:
    from nsa_backend_triton.plugin import nsa_register_backends

    tokens = nsa_register_backends().slots["select"].warmup_tokens
    for architecture in configs.TABLES:
        rows = [limits for limits, _ in configs.table(architecture)["select_forward"]]
        for index, limits in enumerate(rows):
            if most := limits.get("blocks"):
                assert most * 64 < tokens
                others = {name: limit for name, limit in limits.items() if name != "blocks"}
                assert others in rows[index + 1 :]  # of longer sequences
