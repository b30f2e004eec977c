"""Fixtures that install toy plugins, and load them in the library or through the command `nsa`."""

from __future__ import annotations

import pathlib
import pickle
import sys
import types
from collections.abc import Callable

import pytest

import toys
from clean_environment import clean_environment as clean_environment
from installed import install as install_into
from nsa_core.plan.registry import Registry, discover

LIMIT_S = 8.0  # long enough for a busy machine; only toy-hangs reaches it


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with every toy plugin; toy-good is built as a wheel and installed by pip."""
    target = tmp_path_factory.mktemp("zoo")
    toys.build_and_install(tmp_path_factory.mktemp("build"), target, "toy-good", priority=5)
    for name, (point, source) in {**toys.SOURCES, **toys.DEADLY}.items():
        install_into(target, name, source, point=point, version="1.2")
    return target


@pytest.fixture(scope="session")
def isolated(zoo: pathlib.Path) -> Registry:
    """The registry of the zoo, each plugin of which runs in a child process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NSA_PLUGINS", raising=False)
        patch.delenv("NSA_DISABLE_PLUGINS", raising=False)
        patch.syspath_prepend(str(zoo))
        return discover(isolate=True, limit_s=LIMIT_S)


@pytest.fixture
def discovered(isolated: Registry, zoo: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The same registry, whose plugins run in this process."""
    monkeypatch.syspath_prepend(str(zoo))
    registry: Registry = pickle.loads(pickle.dumps(isolated))
    return registry


@pytest.fixture
def install(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pathlib.Path]:
    """Return a function that installs toy plugins into an empty directory on the path."""
    target = tmp_path / "site"
    target.mkdir()
    monkeypatch.syspath_prepend(str(target))

    def install_toy(
        distribution: str, source: str, point: str | None = None, version: str = "1.2"
    ) -> pathlib.Path:
        install_into(target, distribution, source, point=point, version=version)
        monkeypatch.delitem(sys.modules, distribution.replace("-", "_"), raising=False)
        return target

    return install_toy


@pytest.fixture
def toy(monkeypatch):
    """An importable module "planned"; tests set the functions that specs name as its attributes."""
    module = types.ModuleType("planned")
    module.accept = lambda request: []
    module.forward = lambda *tensors, call: None
    monkeypatch.setitem(sys.modules, "planned", module)
    return module
