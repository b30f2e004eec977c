"""Dense baselines: the packages flash-attn and flash-attn-3, and the reasons if they cannot run."""

from __future__ import annotations

import importlib.machinery
import re
import sys
import warnings
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from nsa_bench import baselines
from nsa_bench.inputs import make_inputs
from nsa_core import NSAConfig

CONFIG = NSAConfig(32, 4, 2, head_dim=32, scale=0.3)
MODULES = {
    "flash-attn": "flash_attn",
    "flash-attn 3": "flash_attn_interface",
    "flash-attn 4": "flash_attn.cute",
}


def attend(q, k, v, softmax_scale=None, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert q.shape[2] == k.shape[2], "is_causal needs as many queries as keys"
    o = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return o.transpose(1, 2)


@pytest.fixture
def install(monkeypatch):
    """A function that installs a stand-in for a package with this flash_attn_func."""

    def put(name, function=None):
        module = ModuleType(MODULES[name])
        module.__spec__ = importlib.machinery.ModuleSpec(MODULES[name], None, origin="here")
        monkeypatch.setitem(sys.modules, MODULES[name].partition(".")[0], module)
        if function is not None:
            module.flash_attn_func = function
        monkeypatch.setitem(sys.modules, MODULES[name], module)
        return baselines._package(name, CONFIG, "cpu", torch.float64)

    return put


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_package_computes_causal_attention_with_the_scale(install, name, with_lse):
    baseline = install(
        name, lambda *x, **k: (attend(*x, **k), None) if with_lse else attend(*x, **k)
    )
    assert (baseline.name, baseline.reason, baseline.kind) == (f"dense {name}", "", "dense")
    x = make_inputs("random", CONFIG, batch=2, length=20, dtype=torch.float64, device="cpu", seed=1)
    sdpa = baselines._sdpa("flash", CONFIG, "cpu", torch.float64)
    torch.testing.assert_close(baseline.forward(x), sdpa.forward(x))


@pytest.mark.parametrize("widths", [(32, 16), (16, 32)])
def test_sdpa_pads_heads_for_a_kernel_of_one_width(widths):
    """The flash kernel of the CPU refuses heads of v that are not as wide as those of k."""
    config = NSAConfig(32, 4, 2, head_dim=widths[0], v_head_dim=widths[1], scale=0.3)
    baseline = baselines._sdpa("flash", config, "cpu", torch.float64)
    assert (baseline.name, baseline.reason) == ("dense flash, padded heads", "")
    x = make_inputs("random", config, batch=2, length=20, dtype=torch.float64, device="cpu", seed=1)
    expected = attend(x.q, x.k, x.v, softmax_scale=0.3, causal=True)
    torch.testing.assert_close(baseline.forward(x), expected)


@pytest.mark.parametrize("name", MODULES)
def test_an_absent_package_is_named(monkeypatch, name):
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda module: None)
    reason = baselines._package(name, CONFIG, "cpu", torch.float64).reason
    assert reason.startswith("the package flash-attn")
    assert reason.endswith("is not installed")
    assert ("flash_attn_interface" in reason) == (name == "flash-attn 3")


def test_a_module_is_installed_if_it_has_a_file(tmp_path, monkeypatch):
    """flash-attn-4 alone makes a namespace of flash_attn; another module of it may not load."""
    for path, text in (
        ("namespace_only/part/__init__.py", ""),
        ("whole/__init__.py", ""),
        ("broken/__init__.py", "raise ImportError('undefined symbol')"),
    ):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for module, installed in {
        "namespace_only": False,
        "namespace_only.part": True,
        "whole": True,
        "whole.cute": False,
        "broken.cute": True,
        "nowhere.cute": False,
    }.items():
        assert baselines.is_installed(module) == installed, module


def test_a_kernel_that_refuses_gives_its_reason_and_prints_no_warning(install, recwarn):
    def refuse(*tensors, **options):
        warnings.warn("the kernel was not used", stacklevel=1)
        raise ValueError("no kernel")

    assert "no kernel" in install("flash-attn", refuse).reason
    assert not [w for w in recwarn if "the kernel was not used" in str(w.message)]


def test_a_package_with_another_interface_gives_its_error_as_the_reason(install):
    assert "flash_attn_func" in install("flash-attn 3").reason
    assert "softmax_scale" in install("flash-attn 3", lambda q, k, v, causal: q).reason


@pytest.mark.parametrize(
    ("wrong", "tensor"),
    [
        (lambda q, k, v, **options: 0 * attend(q, k, v, **options), "o"),
        (lambda q, k, v, **options: attend(q, k, v, **(options | {"causal": False})), "o"),
        (lambda q, k, v, **options: attend(q, k, v, **options) * torch.nan, "o"),
        (lambda q, k, v, **options: attend(2 * q - q.detach(), k, v, **options), "dq"),
        (lambda q, k, v, **options: attend(q, k, 2 * v - v.detach(), **options), "dv"),
    ],
)
def test_a_kernel_with_wrong_results_is_no_baseline(install, wrong, tensor):
    """A flash-attn that was built without the width of the heads returns anything, and fast."""
    reason = install("flash-attn", wrong).reason
    assert re.match(rf"its {tensor} is wrong: (\d+|nan) % away from exact attention", reason)
    assert reason.endswith("was it built for float64 and heads of 32?")


def test_flash_attention_4_that_does_not_run_may_be_overwritten(install):
    assert install("flash-attn 4").reason.endswith("install flash-attn-4 after it")
    assert "install flash-attn-4" not in install("flash-attn 3").reason


def test_flash_attention_4_is_no_baseline_where_its_gradients_are_wrong(install, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "CONFIG", NSAConfig(32, 4, 2, head_dim=80))
    assert "no multiple of 32" in install("flash-attn 4", attend).reason
    assert install("flash-attn", attend).reason == ""


def test_a_gpu_run_lists_every_dense_kernel(monkeypatch):
    monkeypatch.setattr(baselines, "dense_refusal", lambda *arguments: "")
    names = [b.name for b in baselines.dense_baselines(CONFIG, "cuda", torch.bfloat16)]
    expected = ["cudnn", "flash", "efficient", "flash-attn", "flash-attn 3", "flash-attn 4"]
    assert names == [f"dense {name}" for name in expected]
    assert [b.name for b in baselines.dense_baselines(CONFIG, "cpu", torch.bfloat16)] == [
        "dense flash"
    ]
