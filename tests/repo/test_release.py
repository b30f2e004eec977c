"""A release and its README: one version, pins, one licence, and the commands that CI runs."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import stat
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

import nsa_core

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

PACKAGES = (
    "nsa-backend-fa2",
    "nsa-backend-sdpa",
    "nsa-backend-triton",
    "nsa-bench",
    "nsa-cli",
    "nsa-core",
    "nsa-models",
    "nsa-verify",
)

TEMPLATES = (
    "packages/nsa-cli/src/nsa_cli/template/pyproject.toml.tmpl",
    "docs/write-a-backend.md",
)
PUBLIC_NAMES = {
    "API_VERSION",
    "BackendSpec",
    "BackendUnavailable",
    "BlockGeometry",
    "InvalidInput",
    "NSACache",
    "NSAConfig",
    "NSAError",
    "NSAttention",
    "Plan",
    "Reason",
    "Request",
    "SlotSpec",
    "Unavailable",
    "Unsupported",
    "__version__",
    "hookimpl",
    "nsa_attention",
    "pad",
    "resolve",
    "unpad",
}


def project(repo, package: str) -> str:
    return repo.text(f"packages/{package}/pyproject.toml")


def version(repo, package: str) -> str:
    (found,) = re.findall(r'(?m)^version = "([^"]+)"$', project(repo, package))
    return found


def metadata(text: str) -> dict:
    """The table [project] of a pyproject.toml."""
    return tomllib.loads(text)["project"]


def requirements(table: dict) -> dict[str, list[Requirement]]:
    """The requirements of [project] by extra; "" has those without one."""
    groups = {"": table["dependencies"], **table.get("optional-dependencies", {})}
    return {extra: [Requirement(line) for line in lines] for extra, lines in groups.items()}


def requirements_on_ours(text: str) -> list[Requirement]:
    groups = requirements(metadata(text)).values()
    return [one for group in groups for one in group if one.name.startswith("nsa-")]


def test_one_version_for_all_packages(repo):
    assert sorted(
        p.name for p in (repo.root / "packages").iterdir() if (p / "pyproject.toml").exists()
    ) == list(PACKAGES)
    versions = {package: version(repo, package) for package in PACKAGES}
    assert len(set(versions.values())) == 1, versions
    installed = {package: importlib.metadata.version(package) for package in PACKAGES}
    assert installed == versions, "the environment is stale: install the packages again"


@pytest.mark.parametrize("package", PACKAGES)
def test_requirements_on_our_packages_fit_their_version(package, repo):
    """Exact pins; a backend takes the releases of nsa-core that are compatible with this one."""
    current = version(repo, package)
    for one in requirements_on_ours(project(repo, package)):
        assert one.name in PACKAGES
        assert one.specifier.contains(current, prereleases=True), one
        exact = str(one.specifier) == f"=={current}"
        assert exact == (not package.startswith("nsa-backend-")), one
        if not exact:
            major, minor, patch = map(int, re.findall(r"\d+", current)[:3])
            assert one.specifier.contains(f"{major}.{minor}.{patch + 1}"), one
            assert not one.specifier.contains(f"{major + 1}.0.0"), one
            assert major or not one.specifier.contains(f"0.{minor + 1}.0"), one


def test_the_command_brings_what_its_commands_import(repo):
    groups = requirements(metadata(project(repo, "nsa-cli")))
    names = {one.name: str(one.marker or "") for one in groups.pop("")}
    imported = {
        name.replace("_", "-")
        for path in (repo.root / "packages/nsa-cli/src").rglob("*.py")
        for name in re.findall(r"(?m)^ *(?:from|import) (nsa_(?!cli)\w+)", path.read_text())
    }
    assert imported == {"nsa-core", "nsa-verify", "nsa-bench", "nsa-models"}
    assert names == {
        **dict.fromkeys([*imported, "nsa-backend-sdpa", "typer", "rich"], ""),
        "nsa-backend-triton": 'sys_platform == "linux"',
    }
    assert groups.keys() == {"fa2", "train", "plot", "all"}


def wanted(repo, package: str, extra: str) -> set[str]:
    """Third-party distributions and our packages that ``package[extra]`` leads to."""
    names: set[str] = set()
    for one in requirements(metadata(project(repo, package)))[extra]:
        names.add(one.name)
        for inner in one.extras:
            names |= wanted(repo, one.name, inner)
    return names


def test_the_extra_all_has_every_extra_of_the_command_and_pytest(repo):
    everything = wanted(repo, "nsa-cli", "all")
    for extra in ("fa2", "train", "plot"):
        assert wanted(repo, "nsa-cli", extra) <= everything, extra
    assert wanted(repo, "nsa-verify", "test") <= everything
    assert wanted(repo, "nsa-bench", "checkpoint") <= everything
    assert everything >= {"pytest", "matplotlib", "safetensors", "tokenizers", "datasets"}


def test_the_core_alone_adds_no_pytest_plugin_and_no_extras(repo):
    core = importlib.metadata.distribution("nsa-core")
    assert not list(core.entry_points)
    assert not core.metadata.get_all("Provides-Extra")
    assert not metadata(project(repo, "nsa-core")).keys() & {
        "entry-points",
        "optional-dependencies",
    }
    verify = importlib.metadata.distribution("nsa-verify")
    assert [point.group for point in verify.entry_points] == ["pytest11"]


def test_version_stands_nowhere_else(repo):
    """In no module: importlib.metadata has it, and nsa_core.__version__ asks there."""
    wrong = [
        name
        for name in repo.python("packages")
        if re.search(r"(?m)^__version__\b", repo.text(name))
        or re.search(rf'"{re.escape(version(repo, "nsa-core"))}"', repo.text(name))
    ]
    assert not wrong, f"a version in {wrong}: importlib.metadata knows it"
    assert nsa_core.__version__ == importlib.metadata.version("nsa-core")


def test_public_names_of_the_core():
    """Today's exports stay; a new one is added here."""
    assert set(nsa_core.__all__) == set(dir(nsa_core)) == PUBLIC_NAMES
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        _ = nsa_core.missing


def bumped(repo, folder, to: str) -> dict[str, str]:
    """The files that bump writes, after `nox -s bump -- TO` on a copy in ``folder``."""
    names = [f"packages/{package}/pyproject.toml" for package in PACKAGES]
    names += TEMPLATES
    for name in (*names, "noxfile.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(repo.text(name))
    stub = (
        "import types, sys; nox = types.ModuleType('nox'); nox.session = lambda *a, **k: (a[0] if a"
        " else lambda f: f)\n"
    )
    stub += "nox.command = sys.modules['nox.command'] = types.ModuleType('nox.command');"
    stub += (
        "nox.options = types.SimpleNamespace(); nox.Session = object; sys.modules['nox'] = nox\n"
    )
    stub += f"import noxfile; noxfile.bump(types.SimpleNamespace(posargs=['{to}'], log=print))"
    done = subprocess.run(
        [sys.executable, "-c", stub], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name: (folder / name).read_text() for name in names}


@pytest.mark.parametrize(
    ("to", "compatible"),
    [("9.8.7", ">=9.8.7,<10"), ("0.3.0", ">=0.3.0,<0.4"), ("0.4.0rc1", ">=0.4.0rc1,<0.5")],
)
def test_bump_writes_every_version_pin_and_range(to, compatible, repo, tmp_path):
    found = bumped(repo, tmp_path, to)
    old = version(repo, "nsa-core")
    for package in PACKAGES:
        name = f"packages/{package}/pyproject.toml"
        expected = repo.text(name).replace(f'"{old}"', f'"{to}"').replace(f"=={old}", f"=={to}")
        expected = re.sub(r"(?<=nsa-core)>=[^\"]*", compatible, expected)
        assert found[name] == expected
        assert metadata(found[name])["version"] == to
        for one in requirements_on_ours(found[name]):
            assert one.specifier.contains(to, prereleases=True), one
    for name in TEMPLATES:
        assert found[name] == re.sub(r"(?<=nsa-core)>=[^\"]*", compatible, repo.text(name))
        assert f'version = "{old}"' in found[name], "the version of the package of its reader"
    pins = "".join(found[name] for name in found)
    assert f'"nsa-bench[plot]=={to}"' in pins
    assert f"\"nsa-backend-triton=={to}; sys_platform == 'linux'\"" in pins


def test_every_package_carries_the_licence(repo):
    for package in PACKAGES:
        assert repo.text(f"packages/{package}/LICENSE") == repo.text("LICENSE")
        assert 'license-files = ["LICENSE"]' in project(repo, package)


def test_packages_build_with_setuptools_alone(repo):
    for package in PACKAGES:
        assert 'requires = ["setuptools>=77"]\nbuild-backend = "setuptools.build_meta"' in project(
            repo, package
        )
    assert '"torch>=2.8"' in project(repo, "nsa-core")


def commands(repo) -> list[str]:
    """The one-line shell commands of the README's first screen, in order."""
    return re.findall(r"```bash\n([^\n]+)\n```", repo.text("README.md").split("\n## ")[0])


def test_ci_runs_the_second_command_of_the_readme(repo):
    first, second = commands(repo)
    script = repo.text(".ci/run").splitlines()
    assert script[0] == "#!/usr/bin/env bash"
    assert [line for line in script if line and not line.startswith("#")] == [
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")/.."',
        second,
    ]
    assert os.stat(repo.root / ".ci/run").st_mode & stat.S_IXUSR
    assert first.endswith("&& nsa backends list && nsa verify")


def test_torch_version_is_one_everywhere(repo):
    first, _ = commands(repo)
    pins = set(
        re.findall(r"torch==([\d.]+\d)", first + repo.text("noxfile.py") + repo.text("README.md"))
    )
    assert pins == {"2.13.0"}


def test_what_it_buys_is_arithmetic(repo):
    """The README's table: S/d + n*l' + w keys read by a query against S, with the paper's sizes."""
    rows = re.findall(
        r"(?m)^\| (\d+)k \| ([\d ]+) \| ([\d ]+) \| ([\d.]+)x \|$", repo.text("README.md")
    )
    assert [int(row[0]) for row in rows] == [8, 16, 32, 64]
    for length, dense, read, ratio in rows:
        tokens = int(length) * 1024
        bound = tokens // 16 + 16 * 64 + 512
        assert (int(dense.replace(" ", "")), int(read.replace(" ", ""))) == (tokens, bound)
        assert ratio == f"{tokens / bound:.1f}"


def test_readme_code_runs(repo):
    (code,) = re.findall(
        r"```python\n(.*?)```", repo.text("README.md").split("\n## ")[0], re.DOTALL
    )
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def test_syntax_is_python_3_10(repo):
    for path in repo.files():
        if path.suffix == ".py":
            ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    assert 'target-version = "py310"' in repo.text("pyproject.toml")
    assert 'python_version = "3.10"' in repo.text("pyproject.toml")
