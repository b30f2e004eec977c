"""Fixtures that install toy plugins, and load them in the library or through the command `nsa`."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable, Mapping

import pytest

import toys
from nsa_core.plan import trial
from nsa_core.plan.loading import installed
from nsa_core.plan.registry import Registry, discover

LIMIT_S = 8.0  # long enough for a busy machine; only toy-hangs reaches it


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Use no plugin settings from the environment, and an empty cache directory."""
    monkeypatch.delenv("NSA_PLUGINS", raising=False)
    monkeypatch.delenv("NSA_DISABLE_PLUGINS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with every toy plugin; toy-good is built as a wheel and installed by pip."""
    target = tmp_path_factory.mktemp("zoo")
    toys.build_and_install(tmp_path_factory.mktemp("build"), target, "toy-good", priority=5)
    for name, (point, source) in {**toys.SOURCES, **toys.DEADLY}.items():
        toys.install(target, name, point, source)
    return target


@pytest.fixture(scope="session")
def discovered(
    zoo: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Registry, pathlib.Path]:
    """The registry of the zoo, discovered once with isolation, and its cache directory."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.delenv("NSA_PLUGINS", raising=False)
        patch.delenv("NSA_DISABLE_PLUGINS", raising=False)
        patch.syspath_prepend(str(zoo))
        third_party = [plugin for plugin in installed() if not plugin.first_party]
        # Check this before any plugin is loaded in this process: a deadly toy would end the test
        # run, some of them with exit status 0.
        failed = trial.failed_trials(third_party, LIMIT_S)
        assert {plugin.distribution for plugin in failed} == set(toys.DEADLY)
        return discover(isolate=True, limit_s=LIMIT_S), cache


@pytest.fixture
def install(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pathlib.Path]:
    """Return a function that installs toy plugins into an empty directory on the path."""
    target = tmp_path / "site"
    target.mkdir()
    monkeypatch.syspath_prepend(str(target))

    def install_toy(
        distribution: str, source: str, point: str | None = None, version: str = "1.2"
    ) -> pathlib.Path:
        toys.install(target, distribution, point or distribution, source, version)
        monkeypatch.delitem(sys.modules, distribution.replace("-", "_"), raising=False)
        return target

    return install_toy


@pytest.fixture
def nsa() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs `nsa` in a process of its own, with ``path`` on its path."""

    def run(
        *arguments: str, path: pathlib.Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **({"PYTHONPATH": str(path)} if path else {}),
            **(env or {}),
        }
        return subprocess.run(
            [sys.executable, "-m", "nsa_cli", *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
        )

    return run


@pytest.fixture
def listed(nsa) -> Callable[..., dict[str, dict]]:
    """Return a function that returns the rows of `nsa backends list --json` by distribution."""

    def read(*options: str, **run_options) -> dict[str, dict]:
        done = nsa(*options, "backends", "list", "--json", **run_options)
        assert done.returncode == 0, done.stderr
        return {row["distribution"]: row for row in json.loads(done.stdout)["backends"]}

    return read


@pytest.fixture
def toy(monkeypatch):
    """An importable module "planned"; tests set the functions that specs name as its attributes."""
    module = types.ModuleType("planned")
    module.accept = lambda request: []
    module.forward = lambda *tensors, call: None
    monkeypatch.setitem(sys.modules, "planned", module)
    return module
