"""Backends created from the template of `nsa backends new`, correct or with a planted fault."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping

import pytest

from clean_environment import clean_environment as clean_environment
from nsa_cli import scaffold
from nsa_core.contract import BackendSpec, import_named
from nsa_core.plan.registry import default_registry
from nsa_verify.conformance import BackendConformance

# module of the package -> (source text that occurs once, its replacement)
Changes = Mapping[str, tuple[str, str]]


@pytest.fixture
def make_suite(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., BackendConformance]:
    """Return a function that creates the suite for a template backend with ``changes``."""

    def make(name: str, changes: Changes | None = None) -> BackendConformance:
        home = tmp_path / name
        scaffold.create(name, home)
        package = home / "src" / f"nsa_backend_{name.replace('-', '_')}"
        for module, (old, new) in (changes or {}).items():
            file = package / f"{module}.py"
            text = file.read_text()
            assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {module}"
            file.write_text(text.replace(old, new))
        monkeypatch.syspath_prepend(str(home / "src"))
        spec: BackendSpec = import_named(f"{package.name}.plugin:nsa_register_backends")()
        suite = type(
            "Suite", (BackendConformance,), {"registry": default_registry().with_backend(spec)}
        )()
        suite.backend, suite._device = name, "cpu"
        return suite

    return make
