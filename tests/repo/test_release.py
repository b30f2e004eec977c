"""Release metadata and README: versions, requirements, licences, and the commands of CI."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import stat
import subprocess
import sys
import textwrap
import types

import pytest
from packaging.requirements import Requirement

import nsa_core

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest depends on tomli
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
    "nsa-vllm",
)

TEMPLATE = "packages/nsa-cli/src/nsa_cli/template/pyproject.toml.tmpl"
PUBLIC_NAMES = {
    "API_VERSION",
    "BackendSpec",
    "BackendUnavailable",
    "BlockGeometry",
    "DecodeRows",
    "InvalidInput",
    "LayerPages",
    "NSACache",
    "NSAConfig",
    "NSAError",
    "NSAttention",
    "PagedKV",
    "Plan",
    "Reason",
    "Request",
    "SlotSpec",
    "Unavailable",
    "Unsupported",
    "__version__",
    "attention_flops",
    "block_attention",
    "block_attention_decode",
    "block_attention_decode_with_lse",
    "block_attention_with_lse",
    "decode_rows",
    "hookimpl",
    "kv_scale",
    "nsa_attention",
    "nsa_attention_with_lse",
    "nsa_decode",
    "pad",
    "plan_block_attention",
    "resolve",
    "rope_angles",
    "unpad",
}


def project(repo, package: str) -> str:
    return repo.text(f"packages/{package}/pyproject.toml")


def version_of(repo, package: str) -> str:
    (version,) = re.findall(r'(?m)^version = "([^"]+)"$', project(repo, package))
    return version


def metadata(text: str) -> dict:
    """Return the table [project] of a pyproject.toml."""
    return tomllib.loads(text)["project"]


def requirements(table: dict) -> dict[str, list[Requirement]]:
    """Return the requirements of [project] by extra; those without an extra have the key ""."""
    groups = {"": table["dependencies"], **table.get("optional-dependencies", {})}
    return {extra: [Requirement(line) for line in lines] for extra, lines in groups.items()}


def requirements_on_ours(text: str) -> list[Requirement]:
    groups = requirements(metadata(text)).values()
    return [
        requirement
        for group in groups
        for requirement in group
        if requirement.name.startswith("nsa-")
    ]


def test_all_packages_have_one_version(repo):
    assert sorted(
        p.name for p in (repo.root / "packages").iterdir() if (p / "pyproject.toml").exists()
    ) == list(PACKAGES)
    versions = {package: version_of(repo, package) for package in PACKAGES}
    assert len(set(versions.values())) == 1, versions
    installed = {package: importlib.metadata.version(package) for package in PACKAGES}
    assert installed == versions, "the installed packages are outdated: install them again"


@pytest.mark.parametrize("package", PACKAGES)
def test_requirements_on_our_packages_match_their_version(package, repo):
    """Packages pin each other exactly; a backend accepts all compatible releases of nsa-core."""
    current = version_of(repo, package)
    for requirement in requirements_on_ours(project(repo, package)):
        specifier = requirement.specifier
        assert requirement.name in PACKAGES
        assert specifier.contains(current, prereleases=True), requirement
        exact = str(specifier) == f"=={current}"
        assert exact == (not package.startswith("nsa-backend-")), requirement
        if not exact:
            major, minor, patch = map(int, re.findall(r"\d+", current)[:3])
            assert specifier.contains(f"{major}.{minor}.{patch + 1}"), requirement
            assert not specifier.contains(f"{major + 1}.0.0"), requirement
            assert major or not specifier.contains(f"0.{minor + 1}.0"), requirement


def test_nsa_cli_requires_the_packages_that_it_imports(repo):
    groups = requirements(metadata(project(repo, "nsa-cli")))
    names = {requirement.name: str(requirement.marker or "") for requirement in groups.pop("")}
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
    assert groups.keys() == {"fa2", "train", "hf", "plot", "all"}


def test_nsa_models_requires_backends_that_run_its_models(repo):
    """`pip install 'nsa-models[hf]'` alone must run a model, on the CPU and on a GPU."""
    groups = requirements(metadata(project(repo, "nsa-models")))
    names = {requirement.name: str(requirement.marker or "") for requirement in groups[""]}
    assert names == {
        **dict.fromkeys(["nsa-core", "nsa-bench", "nsa-backend-sdpa", "filelock"], ""),
        "nsa-backend-triton": 'sys_platform == "linux"',
    }


def required_by(repo, package: str, extra: str) -> set[str]:
    """Return the distributions that ``package[extra]`` requires, including our nested extras."""
    names: set[str] = set()
    for requirement in requirements(metadata(project(repo, package)))[extra]:
        names.add(requirement.name)
        for nested in requirement.extras if requirement.name in PACKAGES else ():
            names |= required_by(repo, requirement.name, nested)
    return names


def test_the_extra_all_includes_every_extra_and_pytest(repo):
    everything = required_by(repo, "nsa-cli", "all")
    for extra in ("fa2", "train", "hf", "plot"):
        assert required_by(repo, "nsa-cli", extra) <= everything, extra
    assert required_by(repo, "nsa-verify", "test") <= everything
    assert required_by(repo, "nsa-bench", "checkpoint") <= everything
    assert everything >= {"pytest", "matplotlib", "safetensors", "tokenizers", "datasets"}


def test_only_nsa_verify_adds_a_pytest_plugin(repo):
    """nsa-core has no entry points and no extras."""
    core = importlib.metadata.distribution("nsa-core")
    assert not list(core.entry_points)
    assert not core.metadata.get_all("Provides-Extra")
    assert not metadata(project(repo, "nsa-core")).keys() & {
        "entry-points",
        "optional-dependencies",
    }
    verify = importlib.metadata.distribution("nsa-verify")
    assert [point.group for point in verify.entry_points] == ["pytest11"]


def test_nsa_core_exports_the_public_names():
    """Public names are stable; add a new name to PUBLIC_NAMES."""
    assert set(nsa_core.__all__) == set(dir(nsa_core)) == PUBLIC_NAMES
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        _ = nsa_core.missing


def test_type_checkers_import_each_public_name_from_its_module(repo):
    """The imports below `if TYPE_CHECKING` name what _MODULE_OF names, each for re-export."""
    path = "packages/nsa-core/src/nsa_core/__init__.py"
    names = {
        alias.asname: (node.module, alias.name)
        for node in ast.walk(ast.parse(repo.text(path)))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("nsa_core.")
        for alias in node.names
    }
    modules = nsa_core._MODULE_OF.items()
    assert names == {name: (f"nsa_core.{module}", name) for name, module in modules}


@pytest.mark.slow
def test_mypy_knows_the_types_of_public_names(repo, tmp_path):
    """It takes half a minute, because mypy reads torch."""
    code = """
        import nsa_core
        from nsa_core import InvalidInput, NSAConfig, nsa_attention

        reveal_type(nsa_core.NSAttention(NSAConfig(64, 4, 2)))
        reveal_type(nsa_attention(1))
        reveal_type(nsa_core.__version__)
        raise nsa_core.InvalidImput
    """
    (tmp_path / "user.py").write_text(textwrap.dedent(code))
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "cache", "user.py"]
    environment = os.environ | {"MYPYPATH": str(repo.root / "packages/nsa-core/src")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    errors = re.findall(r"error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE)
    assert errors == ["call-arg", "arg-type", "attr-defined"], done.stdout + done.stderr
    assert re.findall('type is "(.*)"', done.stdout) == [
        "nsa_core.layer.module.NSAttention",
        "torch._tensor.Tensor",
        "str",
    ]


def noxfile_of(folder) -> types.ModuleType:
    """Import the noxfile of ``folder`` with a nox whose decorators change nothing."""
    nox = types.ModuleType("nox")
    nox.session = lambda *arguments, **options: arguments[0] if arguments else lambda f: f
    nox.parametrize = lambda *arguments, **options: lambda f: f
    nox.command, nox.options, nox.Session = types.ModuleType("nox.command"), nox, object
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nox", nox)
        patch.setitem(sys.modules, "nox.command", nox.command)
        spec = importlib.util.spec_from_file_location("copied_noxfile", folder / "noxfile.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_parts_of_full_run_every_test_once_and_the_blocks_of_a_page_together(repo, tmp_path):
    """Collect the parts of a small repository with the settings of this one."""
    for name in ("pyproject.toml", "tests/conftest.py", "docs/conftest.py"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(repo.text(name))
    folders = ("tests/cli", "tests/gpu", "tests/triton/interpreted", "benchmarks/kernels")
    for number, folder in enumerate(folders):
        (tmp_path / folder).mkdir(parents=True)
        kind = "interpreted" if "interpreted" in folder else "test"
        tests = (f"def test_{name}(): pass\n" for name in "abc")
        (tmp_path / folder / f"{kind}_{number}.py").write_text("".join(tests))
    (tmp_path / "docs" / "page.md").write_text("```python\na = 1\n```\n\n" * 3)
    noxfile, runs = noxfile_of(repo.root), []

    def collect(session, *arguments, env):
        command = [sys.executable, *arguments, "--collect-only", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        runs.append([line for line in done.stdout.splitlines() if "::" in line])

    noxfile.run_shared = collect
    for group in "12":
        session = types.SimpleNamespace(posargs=["--splits", "2", "--group", group])
        noxfile.run_pytest(session, "", (*session.posargs, *noxfile.DIVIDED))
    items = [item for run in runs for item in run]
    assert len(items) == len(set(items)) == 3 * (len(folders) + 1)
    assert [sum("page.md" in item for item in run) for run in runs if "page.md" in str(run)] == [3]


def bumped(repo, folder, to: str) -> dict[str, str]:
    """Return the files that `nox -s bump -- TO` writes, from a copy in ``folder``."""
    names = [f"packages/{package}/pyproject.toml" for package in PACKAGES]
    names += [TEMPLATE, "CITATION.cff"]
    for name in (*names, "noxfile.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(repo.text(name))
    noxfile_of(folder).bump(types.SimpleNamespace(posargs=[to], log=print, error=pytest.fail))
    return {name: (folder / name).read_text() for name in names}


@pytest.mark.parametrize(
    ("to", "compatible"),
    [("9.8.7", ">=9.8.7,<10"), ("0.3.0", ">=0.3.0,<0.4"), ("0.4.0rc1", ">=0.4.0rc1,<0.5")],
)
def test_bump_writes_every_version_pin_and_range(to, compatible, repo, tmp_path):
    texts = bumped(repo, tmp_path, to)
    old = version_of(repo, "nsa-core")
    for package in PACKAGES:
        name = f"packages/{package}/pyproject.toml"
        expected = repo.text(name).replace(f'"{old}"', f'"{to}"').replace(f"=={old}", f"=={to}")
        expected = re.sub(r"(?<=nsa-core)>=[^\"]*", compatible, expected)
        assert texts[name] == expected
        assert metadata(texts[name])["version"] == to
        for requirement in requirements_on_ours(texts[name]):
            assert requirement.specifier.contains(to, prereleases=True), requirement
    template = re.sub(r"(?<=nsa-core)>=[^\"]*", compatible, repo.text(TEMPLATE))
    assert texts[TEMPLATE] == template
    assert f'version = "{old}"' in template, "the example package keeps its own version"
    citation = repo.text("CITATION.cff").replace(f"\nversion: {old}\n", f"\nversion: {to}\n")
    assert texts["CITATION.cff"] == citation != repo.text("CITATION.cff")
    all_texts = "".join(texts.values())
    assert f'"nsa-bench[plot]=={to}"' in all_texts
    assert f"\"nsa-backend-triton=={to}; sys_platform == 'linux'\"" in all_texts


def test_every_package_includes_the_licence(repo):
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
    """Return the two commands of the README: its first one-line bash blocks."""
    return re.findall(r"```bash\n([^\n]+)\n```", repo.text("README.md"))[:2]


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


def test_one_torch_version_is_pinned_everywhere(repo):
    first, _ = commands(repo)
    pins = set(
        re.findall(r"torch==([\d.]+\d)", first + repo.text("noxfile.py") + repo.text("README.md"))
    )
    assert pins == {"2.13.0"}


def test_keys_per_query_match_the_formula(repo):
    """The page states S / d + n * l' + w keys, and how many times fewer than S that is."""
    page = repo.text("docs/start/concepts.md")
    (sentence,) = re.findall(r"a query reads at most[^.]+(?:\.\d[^.]+)+\.", page)
    rows = re.findall(r"([\d,]+)(?: keys)? at (\d+)k(?: tokens)?\s\(([\d.]+)\s?times", sentence)
    assert [int(row[1]) for row in rows] == [8, 16, 32, 64]
    for read, length, ratio in rows:
        tokens = int(length) * 1024
        bound = tokens // 16 + 16 * 64 + 512
        assert int(read.replace(",", "")) == bound
        assert ratio == f"{tokens / bound:.1f}"


def test_the_code_of_the_readme_runs(repo):
    code, *others = re.findall(r"```python\n(.*?)```", repo.text("README.md"), re.DOTALL)
    assert not others
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
