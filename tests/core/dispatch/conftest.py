"""A directory of installed toys, and the library or the command seeing it."""

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
from nsa_core.dispatch import trial
from nsa_core.dispatch.loading import installed
from nsa_core.dispatch.registry import Registry, discover

LIMIT_S = 8.0  # for children on a busy machine; only toy-hangs ever takes it up


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Nobody's settings and nobody's remembered verdicts."""
    monkeypatch.delenv("NSA_PLUGINS", raising=False)
    monkeypatch.delenv("NSA_DISABLE_PLUGINS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Every toy, the good one built as a wheel and installed by pip."""
    target = tmp_path_factory.mktemp("zoo")
    toys.build_and_install(tmp_path_factory.mktemp("build"), target, "toy-good", priority=5)
    for name, (point, source) in {**toys.SOURCES, **toys.DEADLY}.items():
        toys.install(target, name, point, source)
    return target


@pytest.fixture(scope="session")
def tamed(
    zoo: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Registry, pathlib.Path]:
    """The zoo discovered once, with the cache directory in which the verdicts are remembered."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.delenv("NSA_PLUGINS", raising=False)
        patch.delenv("NSA_DISABLE_PLUGINS", raising=False)
        patch.syspath_prepend(str(zoo))
        foreign = [plugin for plugin in installed() if not plugin.first_party]
        # Before anything is loaded here: a deadly toy that slips through would end the test run,
        # some with status 0.
        assert {plugin.distribution for plugin in trial.failed_trials(foreign, LIMIT_S)} == set(
            toys.DEADLY
        )
        return discover(isolate=True, limit_s=LIMIT_S), cache


@pytest.fixture
def install(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pathlib.Path]:
    """Install toys of one's own into a fresh directory on the path."""
    target = tmp_path / "site"
    target.mkdir()
    monkeypatch.syspath_prepend(str(target))

    def put(
        distribution: str, source: str, point: str | None = None, version: str = "1.2"
    ) -> pathlib.Path:
        toys.install(target, distribution, point or distribution, source, version)
        monkeypatch.delitem(sys.modules, distribution.replace("-", "_"), raising=False)
        return target

    return put


@pytest.fixture
def nsa() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `nsa` in a process of its own, with these directories on the path."""

    def run(
        *arguments: str, path: pathlib.Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        given = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **({"PYTHONPATH": str(path)} if path else {}),
            **(env or {}),
        }
        return subprocess.run(
            [sys.executable, "-m", "nsa_cli", *arguments],
            capture_output=True,
            text=True,
            env=given,
            timeout=300,
        )

    return run


@pytest.fixture
def listed(nsa) -> Callable[..., dict[str, dict]]:
    """What `nsa backends list --json` says, by distribution."""

    def read(*options: str, **where) -> dict[str, dict]:
        done = nsa(*options, "backends", "list", "--json", **where)
        assert done.returncode == 0, done.stderr
        return {row["distribution"]: row for row in json.loads(done.stdout)["backends"]}

    return read


@pytest.fixture
def toy(monkeypatch):
    """A module of functions under the name "planned"; attributes set on it are what specs name."""
    module = types.ModuleType("planned")
    module.accept = lambda request: []
    module.forward = lambda *tensors, call: None
    monkeypatch.setitem(sys.modules, "planned", module)
    return module
