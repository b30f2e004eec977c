"""The probe of fa2: reasons, hints and the provider in use, all without a GPU or flash-attn."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fa2_standin import FLASH4, Library, make
from nsa_backend_fa2 import flash4, providers
from nsa_backend_fa2 import probe as probes
from nsa_backend_fa2.plugin import nsa_register_backends
from nsa_backend_fa2.providers import Source
from nsa_core.contract import Reason, Request, import_named
from nsa_core.plan.candidates import details
from nsa_core.plan.registry import Registry
from slot_requests import make_request

GOOD = make_request("win")


def codes(request: Request) -> list[str]:
    return [reason.code for reason in probes.probe(request)]


@pytest.mark.parametrize("name", ["2.8.3", "aten"])
@pytest.mark.parametrize("slot", ["cmp", "sel", "win"])
def test_probe_accepts_what_flash_attention_supports(slot: str, name: str, use_provider) -> None:
    use_provider(name)
    for change in (
        {},
        {"dtype": "float16"},
        {"capability": (8, 0)},
        {"head_dim": 192, "v_head_dim": 128},
        {"head_dim": 256},
        {"n_heads": 2},
        {"n_heads": 128, "n_kv_heads": 2},
        {"varlen": True},
        {"head_dim": 65},
        {"batch": None},
        {"batch": 65536},
        {"varlen": True, "batch": 65535},
        {"partial": True},
        {"partial": True, "varlen": True},
    ):
        assert codes(dataclasses.replace(GOOD, slot=slot, **change)) == []


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        pytest.param(
            {"device": "cpu", "capability": None}, "device", "needs cuda, got cpu", id="row28-cpu"
        ),
        pytest.param({"capability": None}, "no_gpu", "no CUDA GPU", id="no-gpu"),
        pytest.param(
            {"capability": (7, 5)}, "sm_too_old", "needs sm_80, this GPU is sm_75", id="row49-old"
        ),
        pytest.param(
            {"capability": (13, 0)},
            "sm_too_new",
            "up to sm_121, this GPU is sm_130",
            id="row49-new",
        ),
        pytest.param({"dtype": "float32"}, "dtype", "got float32", id="fp32"),
        pytest.param({"dtype": "float64"}, "dtype", "got float64", id="row21-fp64"),
        pytest.param({"head_dim": 257}, "head_dim", "257/64 exceed 256", id="row13-wide"),
        pytest.param({"v_head_dim": 264}, "head_dim", "64/264 exceed 256", id="row14-wide-v"),
        pytest.param(
            {"varlen": True, "batch": 65536},
            "too_many_documents",
            "65536 documents",
            id="row44-documents",
        ),
        pytest.param({"slot": "cmp", "n_heads": 4096}, "too_many_heads", "65536", id="row44-heads"),
    ],
)
def test_probe_refuses_with_a_reason(change: dict, code: str, words: str, use_provider) -> None:
    use_provider("2.8.3")
    (reason,) = probes.probe(dataclasses.replace(GOOD, **change))
    assert reason.code == code
    assert words in reason.message
    assert reason.hint


def test_hint_for_an_old_gpu_names_a_backend_that_runs_there(use_provider) -> None:
    use_provider("2.8.3")
    (reason,) = probes.probe(dataclasses.replace(GOOD, capability=(7, 5)))
    assert reason.hint == "use sdpa"  # triton needs sm_80 too


def test_probe_returns_all_reasons(use_provider) -> None:
    use_provider("2.8.3")
    assert codes(dataclasses.replace(GOOD, dtype="float32", head_dim=512, capability=(7, 0))) == [
        "sm_too_old",
        "dtype",
        "head_dim",
    ]


def test_backward_of_pytorch_is_deterministic_only_under_its_global_setting(use_provider) -> None:
    request = dataclasses.replace(GOOD, deterministic=True)
    use_provider("2.8.3")
    assert codes(request) == []
    use_provider("aten")
    assert codes(request) == ["not_deterministic"]
    assert codes(dataclasses.replace(request, needs_grad=False)) == []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert codes(request) == ["not_deterministic"]
        torch.use_deterministic_algorithms(True)
        assert codes(request) == []
    finally:
        torch.use_deterministic_algorithms(False)
    provider = make("aten", Library())
    attention = providers.Attention(1.0, deterministic=True)
    with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
        provider.backward([*[torch.zeros(1, 1, 1, 8)] * 5, torch.zeros(1, 1, 1)], attention)


def test_backward_of_pytorch_for_head_width_224_needs_large_shared_memory(use_provider) -> None:
    request = dataclasses.replace(GOOD, head_dim=200, capability=(8, 9))
    use_provider("aten")
    assert codes(request) == ["head_dim_backward"]
    assert codes(dataclasses.replace(request, needs_grad=False)) == []
    assert codes(dataclasses.replace(request, capability=(8, 0))) == []
    assert codes(dataclasses.replace(request, head_dim=192)) == []
    assert codes(dataclasses.replace(request, head_dim=256)) == []
    assert codes(dataclasses.replace(request, capability=(12, 0))) == ["head_dim_backward"]
    use_provider("2.8.3")
    assert codes(request) == []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that puts a fake flash-attn of a given version on the path."""

    def install(version: str | None, interface: str | None = None) -> None:
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in [n for n in sys.modules if n.partition(".")[0] == "flash_attn"]:
            monkeypatch.delitem(sys.modules, name)
        if version is not None:
            info = tmp_path / "flash_attn-0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {version}\n"
            )
        if interface is not None:
            package = tmp_path / "flash_attn"
            package.mkdir()
            (package / "__init__.py").write_text("")
            (package / "flash_attn_interface.py").write_text(interface)

    yield install
    for name in [n for n in sys.modules if n.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


HAS_PACKAGE = providers.flash_attn_source().provider is not None
SYMBOL = "flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEa"


@pytest.mark.skipif(HAS_PACKAGE, reason="flash-attn is installed here")
def test_reason_of_a_missing_package_has_an_install_hint(site) -> None:
    site(None)
    reason = providers.flash_attn_source().reason
    assert reason is not None
    assert reason.code == "package_missing"
    assert "pip install" in reason.hint
    assert "FLASH_ATTN_CUDA_ARCHS" in reason.hint


@pytest.mark.parametrize(
    ("version", "interface", "code", "words"),
    [
        (
            "2.2.5",
            "",
            "package_too_old",
            "flash-attn 2.2.5 is too old: needs 2.5",
        ),
        ("3.0.1", "", "package_too_new", "flash-attn 3.0.1 is too new"),
        ("rubbish", "", "package_version", "rubbish"),
        (
            "2.8.3",
            f"raise ImportError({SYMBOL!r})",
            "package_abi_mismatch",
            f"ImportError: {SYMBOL}",
        ),
        ("2.8.3", "import a_module_nobody_has", "package_abi_mismatch", "a_module_nobody_has"),
        ("2.8.3", None, "package_abi_mismatch", "flash_attn"),
    ],
)
@pytest.mark.skipif(HAS_PACKAGE, reason="flash-attn is installed here")
def test_unusable_package_has_a_reason(
    version: str, interface: str | None, code: str, words: str, site
) -> None:
    site(version, interface)
    source = providers.flash_attn_source()
    assert source.provider is None
    assert source.reason is not None
    assert source.reason.code == code
    assert words in source.reason.message
    assert source.reason.hint


@pytest.mark.parametrize(
    "version", ["2.5.8", "2.6.3", "2.7.4.post1", "2.8.3.post2", "2.8.3+cu12torch2.8"]
)
@pytest.mark.skipif(HAS_PACKAGE, reason="flash-attn is installed here")
def test_package_that_loads_is_a_provider(version: str, site) -> None:
    site(version, "loaded = True")
    source = providers.flash_attn_source()
    assert source.provider is not None
    assert source.provider.title == f"flash-attn {version}"


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has the kernels")
def test_torch_without_cuda_is_no_provider() -> None:
    reason = providers._torch_flash().reason
    assert reason is not None
    assert reason.code == "torch_without_flash"


def test_without_a_provider_probe_and_active_provider_give_every_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources = (
        Source("flash-attn", None, Reason("a", "first", "h")),
        Source("PyTorch", None, Reason("b", "second", "h")),
    )
    monkeypatch.setattr(providers, "sources", lambda: sources)
    assert codes(GOOD) == ["a", "b"]
    with pytest.raises(RuntimeError, match=r"first \(h\); second"):
        providers.active_provider()


def test_detail_names_the_provider_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Source(flash4.NAME, None, Reason("package_missing", "none", "get"))
    monkeypatch.setattr(flash4, "source", lambda: absent)
    package, pytorch = make("2.8.3", Library()), make("aten", Library())
    missing = Reason("package_missing", "flash-attn is not installed", "pip install")
    monkeypatch.setattr(
        providers,
        "sources",
        lambda: (Source("flash-attn", package, None), Source("PyTorch", pytorch, None)),
    )
    assert probes.detail() == [
        "flash-attn 2.8.3: in use",
        f"PyTorch {torch.__version__}: not needed",
        "flash-attn-4: none (get)",
    ]
    assert providers.active_provider() is package
    monkeypatch.setattr(
        providers,
        "sources",
        lambda: (Source("flash-attn", None, missing), Source("PyTorch", pytorch, None)),
    )
    assert probes.detail() == [
        "flash-attn: flash-attn is not installed (pip install)",
        f"PyTorch {torch.__version__}: in use",
        "flash-attn-4: none (get)",
    ]
    assert providers.active_provider() is pytorch
    source = Source("flash-attn-4", make(FLASH4, Library()), None)
    monkeypatch.setattr(flash4, "source", lambda: source)
    line = f"flash-attn-4 {FLASH4}: long causal calls of cmp, on sm_90 and the Blackwell GPUs of"
    line += " data centres"
    assert probes.detail()[-1] == line


def test_registering_imports_neither_torch_nor_flash_attn() -> None:
    code = (
        "import sys; from nsa_backend_fa2.plugin import nsa_register_backends as r; r();"
        "print([m for m in ('torch', 'flash_attn') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout.strip() == "[]"


def test_every_function_of_the_spec_can_be_imported() -> None:
    spec = nsa_register_backends()
    assert import_named(spec.probe) is probes.probe
    for slot in spec.slots.values():
        for name in (slot.forward, slot.backward, slot.workspace):
            assert name is not None
            assert callable(import_named(name))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the backend may be ready here")
def test_backends_show_lists_the_status_and_the_sources() -> None:
    command = [sys.executable, "-m", "nsa_cli", "backends", "show", "fa2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout)["backends"]
    assert row["status"] == "unavailable"
    names = [line.partition(":")[0].partition(" ")[0] for line in row["details"]]
    assert names == [
        "flash-attn",
        "PyTorch",
        "flash-attn-4",
    ]  # a version follows if the build has CUDA
    assert row["slots"]["cmp"]["reasons"][0]["message"] == "needs cuda, got cpu"


@pytest.mark.parametrize(
    ("function", "words"),
    [("no_module:f", "ModuleNotFoundError"), ("builtins:input", "raised"), ("builtins:list", None)],
)
def test_failure_of_a_detail_function_is_a_line(function: str, words: str | None) -> None:
    spec = dataclasses.replace(nsa_register_backends(), name="other", detail=function)
    lines = details(Registry(()).with_backend(spec).get("other"))
    assert lines == [] if words is None else words in lines[0]
    assert (
        details(Registry(()).with_backend(dataclasses.replace(spec, detail=None)).get("other"))
        == []
    )
    broken = Registry(()).with_backend(dataclasses.replace(spec, detail="not a path")).get("other")
    assert broken.reason is not None
    assert "detail must be None or 'module:function'" in broken.reason.message
