"""Plugins that change the global state when they are loaded: it is restored, they are named."""

import dataclasses
import itertools
import logging
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import toys
from installed import install
from nsa_core import NSAConfig, NSAttention, resolve
from nsa_core.plan.registry import discover
from nsa_core.util import global_state
from nsa_core.util.global_state import ITEMS, GlobalState

CONFIG = NSAConfig(dim=32, n_heads=4, n_kv_heads=2)
# state -> code that changes it
CHANGES = {
    "PyTorch's default dtype": "import torch; torch.set_default_dtype(torch.float64)",
    "PyTorch's default device": "import torch; torch.set_default_device('meta')",
    "PyTorch's gradient mode": "import torch; torch.set_grad_enabled(False)",
    "PyTorch's deterministic algorithms": "import torch; torch.set_deterministic_debug_mode(2)",
    "PyTorch's number of threads": "import torch; torch.set_num_threads(7)",
    "PyTorch's random state": "import torch; torch.manual_seed(5)",
    "numpy's random state": "import numpy; numpy.random.seed(5)",
    "Python's random state": "import random; random.seed(5)",
    "the working directory": "import os; os.chdir('/')",
}
_numbers = itertools.count()
ALL = "; ".join(CHANGES.values())


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[GlobalState]:
    """A snapshot from before the test, to which a test that fails returns too."""
    monkeypatch.setattr(global_state, "_reported", [])
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    before = GlobalState()
    yield before
    before.restore()


def _sources(change: str, moment: str) -> dict[str, str]:
    """The modules of the toy plugin, which changes state when it is loaded in one of four ways."""
    source = textwrap.dedent(toys.good("toy-state", "toy_state"))
    kernel = "def forward" + source.split("def forward", 1)[1]
    # The operators of a kernel are defined once per path.
    kernels = f"toy_state_kernel_{next(_numbers)}"
    source = source.replace('"toy_state:forward"', f'"{kernels}:forward"')
    source = source.replace('"toy_state:probe"', '"toy_state_probe:probe"')
    probe = "def probe(request):\n    {change}\n    return []\n"
    probes = probe.format(change="pass")
    modules = {"toy_state": source, kernels: kernel, "toy_state_probe": probes}
    if moment == "hook":
        hook = "def nsa_register_backends():\n"
        modules["toy_state"] = source.replace(hook, f"{hook}    {change}\n")
    elif moment == "probe":
        modules["toy_state_probe"] = probe.format(change=change)
    else:
        name = {"import": "toy_state", "kernel": kernels}[moment]
        modules[name] = f"{change}\n{modules[name]}"
    return modules


def _install(path: Path, modules: dict[str, str]) -> None:
    install(path, "toy-state", modules.pop("toy_state"))
    for name, source in modules.items():
        (path / f"{name}.py").write_text(source)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Return a function that installs the toy plugin for this process."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("toy_state", "toy_state_probe"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return lambda modules: _install(tmp_path, modules)


@pytest.mark.parametrize(
    ("name", "moment"),
    [(name, moment) for moment in ("import", "hook", "kernel", "probe") for name in CHANGES],
)
def test_state_is_restored_and_the_plugin_is_named(
    state: GlobalState, installed: Any, caplog: Any, name: str, moment: str
) -> None:
    installed(_sources(CHANGES[name], moment))
    with caplog.at_level(logging.WARNING, logger="nsa"):
        plan = resolve(CONFIG, needs_grad=True, registry=discover())
        assert state.changed() == []
        resolve(CONFIG, needs_grad=True, registry=discover())
        assert "random" in name or state.changed() == []  # each probe may change it again
    assert plan.choices["combine"].backend == "toy-state"
    text = f"loading plugin toy-state changed {name}: restored; report it to the plugin's author"
    assert [record.getMessage() for record in caplog.records] == [text]
    layer = NSAttention(CONFIG)
    y = layer(torch.randn(1, 8, 32, requires_grad=True), plan=plan)
    y.sum().backward()
    assert (y.dtype, layer.out.weight.grad.dtype) == (torch.float32, torch.float32)


def test_a_workspace_function_leaves_the_settings(
    state: GlobalState, installed: Any, caplog: Any
) -> None:
    change = (
        "import torch; torch.set_default_dtype(torch.float64); torch.set_default_device('meta')"
    )
    modules = _sources("pass", "import")
    head = "def workspace(request):\n"
    modules["toy_state"] = modules["toy_state"].replace(head, f"{head}    {change}\n")
    installed(modules)
    plan = resolve(CONFIG, registry=discover())
    request = dataclasses.replace(plan.requests["combine"], batch=2, seq_len=8)
    with caplog.at_level(logging.WARNING, logger="nsa"):
        assert plan.workspace_bytes(request) == 16
    assert state.changed() == []
    (record,) = caplog.records
    names = "PyTorch's default dtype, PyTorch's default device"
    assert f"plugin toy-state changed {names}: restored" in record.getMessage()


@pytest.mark.parametrize("ending", ["1 / 0", "raise SystemExit(3)", "import toy_absent_package"])
def test_a_plugin_that_fails_leaves_no_trace(
    state: GlobalState, installed: Any, caplog: Any, ending: str
) -> None:
    installed({"toy_state": f"{ALL}; {ending}" if ";" not in ending else ending})
    with caplog.at_level(logging.WARNING, logger="nsa"):
        entry = discover().get("toy-state")
    assert entry.status in ("broken", "unavailable")
    assert state.changed() == []
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in CHANGES)


def test_the_table_has_every_item_but_that_of_the_gpu() -> None:
    assert {*CHANGES, "the GPU's random state"} == ITEMS.keys()


def test_a_plugin_in_a_child_is_named_here(installed: Any, caplog: Any) -> None:
    """Without torch: a fork server that has imported it also guards its state."""
    modules = _sources(CHANGES["the working directory"], "hook")
    modules["toy_state_probe"] = "import random; random.seed(5)\ndef probe(request): return []\n"
    installed(modules)
    with caplog.at_level(logging.WARNING, logger="nsa"):
        resolve(CONFIG, needs_grad=True, registry=discover(isolate=True))
    names = ("the working directory", "Python's random state")
    texts = [f"loading plugin toy-state changed {name}: restored; report it" for name in names]
    assert [r.getMessage().partition(" to the plugin")[0] for r in caplog.records] == texts


def test_backends_of_this_project_change_nothing(caplog: Any) -> None:
    code = """
        import logging, numpy, torch
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
        from nsa_core import NSAConfig, resolve
        for phase in ("prefill", "decode"):
            resolve(NSAConfig(32, 4, 2), phase=phase)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
