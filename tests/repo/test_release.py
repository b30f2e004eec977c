"""What a release and a reader's copy-paste rely on: one version, one licence, commands that are
what CI runs.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import stat
import subprocess
import sys

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


def project(repo, package: str) -> str:
    return repo.text(f"packages/{package}/pyproject.toml")


def version(repo, package: str) -> str:
    (found,) = re.findall(r'(?m)^version = "([^"]+)"$', project(repo, package))
    return found


def test_one_version_for_all_five(repo):
    assert sorted(
        p.name for p in (repo.root / "packages").iterdir() if (p / "pyproject.toml").exists()
    ) == list(PACKAGES)
    versions = {package: version(repo, package) for package in PACKAGES}
    assert len(set(versions.values())) == 1, versions
    pins = {
        pin
        for package in PACKAGES
        for pin in re.findall(r'"nsa-[a-z0-9-]+==([^"]+)"', project(repo, package))
    }
    assert pins == set(versions.values())
    installed = {package: importlib.metadata.version(package) for package in PACKAGES}
    assert installed == versions, "the environment is stale: install the packages again"


def test_version_stands_nowhere_else(repo):
    wrong = [
        name
        for name in repo.python("packages")
        if re.search(r"(?m)^__version__\b", repo.text(name))
    ]
    assert not wrong, f"__version__ in {wrong}: importlib.metadata knows it"


def test_bump_writes_all_five_and_the_pins_between_them(repo, tmp_path):
    for package in PACKAGES:
        (tmp_path / "packages" / package).mkdir(parents=True)
        (tmp_path / "packages" / package / "pyproject.toml").write_text(project(repo, package))
    (tmp_path / "noxfile.py").write_text(repo.text("noxfile.py"))
    stub = (
        "import types, sys; nox = types.ModuleType('nox'); nox.session = lambda *a, **k: (a[0] if a"
        " else lambda f: f)\n"
    )
    stub += "nox.command = sys.modules['nox.command'] = types.ModuleType('nox.command');"
    stub += (
        "nox.options = types.SimpleNamespace(); nox.Session = object; sys.modules['nox'] = nox\n"
    )
    stub += "import noxfile; noxfile.bump(types.SimpleNamespace(posargs=['9.8.7'], log=print))"
    done = subprocess.run(
        [sys.executable, "-c", stub], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for package in PACKAGES:
        text = (tmp_path / "packages" / package / "pyproject.toml").read_text()
        old = version(repo, package)
        assert text == project(repo, package).replace(f'"{old}"', '"9.8.7"').replace(
            f"=={old}", "==9.8.7"
        )
        assert 'version = "9.8.7"' in text


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
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


def test_syntax_is_python_3_10(repo):
    for path in repo.files():
        if path.suffix == ".py":
            ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    assert 'target-version = "py310"' in repo.text("pyproject.toml")
    assert 'python_version = "3.10"' in repo.text("pyproject.toml")
