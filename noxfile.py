"""Commands for contributors and CI: `nox -s lint typecheck tests`, `full`, `wheels`, `bump`."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import sys
import zipfile

import nox
import nox.command

ROOT = pathlib.Path(__file__).parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
FIRST_PARTY = {"sdpa", "triton", "fa2"}
TORCH = "torch==2.13.0"
TRITON = "triton==3.6.0"  # docs/kernels.md records the registers of this compiler's kernels
RUFF = "ruff>=0.17,<0.18"  # a formatter's minor version changes what is formatted
TYPE_TOOLS = ("mypy>=2.4,<3",)
TEST_TOOLS = (
    "pytest>=8",
    "pytest-xdist>=3.5",
    "hypothesis>=6.100",
    "import-linter>=2.1",
    "grimp>=3.5",
    "numpy",
    "matplotlib>=3.8",
    "safetensors>=0.4",
    "setuptools>=77",
    "wheel",
    f"{TRITON}; sys_platform == 'linux'",
)
# Two workers share two cores, and hundreds of child processes import the byte code that the first
# of them compiled.
FOR_TESTS = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
INTERPRETING = FOR_TESTS | {"TRITON_INTERPRET": "1"}
INTERPRETED = "tests/triton/interpreted"
# A file stays on one worker, which makes its fixtures once; tests/conftest.py orders the files.
WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
SHARDS = 6  # of `nox -s full`
NOTHING_COLLECTED = 5  # pytest's exit code

nox.needs_version = ">=2025.5.1"  # the first with requires=
nox.options.sessions = ["lint", "typecheck", "tests"]
nox.options.default_venv_backend = (  # uv, where present, would not follow pip's settings
    "virtualenv"
)
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True


def install(session: nox.Session, *packages: str) -> None:
    """Install torch first, then ``packages``.

    Torch goes first and pinned, so that no other package brings its own choice. An environment
    that already sees a torch of the user's keeps it. ``--no-compile``: most of torch's files are
    never imported, and compiling them all takes most of a minute.
    """
    probe = "import importlib.util as u; print(u.find_spec('torch') is not None)"
    if "True" not in str(session.run("python", "-c", probe, silent=True)):
        session.install("--no-compile", TORCH)
    session.install("--no-compile", *packages)


@nox.session(venv_params=["--system-site-packages"], default=False)
def environment(session: nox.Session) -> None:
    """Install what typecheck, tests and full share: torch, the tools, and our packages, editable.

    The environment sees the user's torch, if there is one.
    """
    install(session, *TEST_TOOLS, *TYPE_TOOLS)
    editable = (argument for path in PACKAGES for argument in ("-e", str(path)))
    session.install("--no-compile", "--no-build-isolation", *editable)


def run_shared(session: nox.Session, *arguments: str, **options: object) -> None:
    """Run Python in the environment of the session ``environment``."""
    environments = session.cache_dir.parent.absolute()
    folder = environments / "environment" / ("Scripts" if os.name == "nt" else "bin")
    session.env["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", "")])
    session.run(str(folder / "python"), *arguments, external=True, **options)  # type: ignore[arg-type]


def run_pytest(session: nox.Session, selection: str, shards: tuple[str, ...] = ()) -> None:
    """Run pytest on two workers; arguments after ``--`` replace everything but the selection.

    Each of the ``shards``, without any the suite, takes two pytest runs: kernels in Triton's
    interpreter have their own, because TRITON_INTERPRET must be set before triton is imported.
    """
    runs = []
    for shard in shards or ("",):
        part = ["--shard", shard] if shard else []
        runs.append(([*WORKERS, "--ignore", INTERPRETED, *part], FOR_TESTS))
        runs.append(([*WORKERS, INTERPRETED, *part], INTERPRETING))
    if session.posargs and not shards:
        runs = [(session.posargs, FOR_TESTS)]
    failed = 0
    for arguments, variables in runs:
        try:
            run_shared(
                session,
                *("-m", "pytest", "-m", selection, *arguments),
                env=variables,
                success_codes=[0, NOTHING_COLLECTED] if shards else [0],
            )
        except nox.command.CommandFailed:  # the next run still tells something
            failed += 1
    if failed:
        session.error("red tests, see above")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff check and ruff format --check over the repository."""
    session.install(RUFF)
    session.run("python", "-m", "ruff", "check", ".")
    session.run("python", "-m", "ruff", "format", "--check", ".")


@nox.session(venv_backend="none", requires=["environment"])
def typecheck(session: nox.Session) -> None:
    """mypy, strict, on every package."""
    run_shared(session, "-m", "mypy", *(str(path / "src") for path in PACKAGES))


@nox.session(venv_backend="none", requires=["environment"])
def tests(session: nox.Session) -> None:
    """The ordinary suite; arguments after ``--`` go to pytest."""
    run_pytest(session, "not slow and not gpu")


@nox.session(venv_backend="none", requires=["environment"])
def full(session: nox.Session) -> None:
    """Every test, the slow ones too; those that need a GPU run where there is one.

    Runs all shards in turn, or one of them: `nox -s full -- --shard 2/6`. Other arguments after
    ``--`` go to pytest.
    """
    every = tuple(f"{number}/{SHARDS}" for number in range(1, SHARDS + 1))
    one = tuple(session.posargs[1:]) if session.posargs[:1] == ["--shard"] else ()
    run_pytest(session, "", one or (() if session.posargs else every))


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build the wheels of all packages into the folder that `wheels` installs from; check them."""
    install(session, "setuptools>=77", "wheel", "twine>=6")
    dist = session.cache_dir.absolute() / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for path in PACKAGES:
        # a file deleted since the last build would come back
        shutil.rmtree(path / "build", ignore_errors=True)
    command = ["pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(dist)]
    session.run("python", "-m", *command, *map(str, PACKAGES))
    built = sorted(dist.glob("*.whl"))
    if len(built) != len(PACKAGES):
        session.error(f"{len(PACKAGES)} packages, {len(built)} wheels")
    for wheel in built:
        check_wheel(session, wheel)
    session.run("python", "-m", "twine", "check", "--strict", *map(str, built))


@nox.session(reuse_venv=False, requires=["build"])
def wheels(session: nox.Session) -> None:
    """Install all wheels in a fresh environment, and use it; then with triton, then without
    sdpa.
    """
    dist = session.cache_dir.absolute() / "dist"
    install(session, *map(str, sorted(dist.glob("*.whl"))))
    session.chdir(dist)  # away from the sources, so that only the wheels are imported
    session.run("python", "-m", "pip", "check")
    check_no_numpy(session)
    check_listing(session)
    session.run("nsa", "verify")  # with the wheels' own dependencies and nothing else
    if sys.platform == "linux":
        session.install("--no-compile", TRITON)
        check_no_numpy(session)
        check_triton(session)
    session.run("python", "-m", "pip", "uninstall", "-y", "nsa-backend-sdpa")
    check_without_sdpa(session)


def check_wheel(session: nox.Session, wheel: pathlib.Path) -> None:
    """A wheel holds one package, its type marker and its licence, and nothing else."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    package = wheel.name.split("-")[0]
    missing = [
        end
        for end in (f"{package}/py.typed", "licenses/LICENSE")
        if not any(n.endswith(end) for n in names)
    ]
    if missing or len(tops) != 2:
        session.error(f"{wheel.name}: holds {sorted(tops)}, misses {missing}")


def check_no_numpy(session: nox.Session) -> None:
    """numpy is no dependency of ours: with it installed, the next checks would prove less."""
    probe = "import importlib.util as u; print(u.find_spec('numpy') is None)"
    if "True" not in str(session.run("python", "-c", probe, silent=True)):
        session.error("numpy can be imported in the environment of the wheels")


def check_listing(session: nox.Session) -> None:
    """`nsa backends list --json` sees every backend of ours, and sdpa is ready."""
    text = session.run("nsa", "backends", "list", "--json", silent=True, stderr=None)
    listed = {entry["name"]: entry["status"] for entry in json.loads(str(text))["backends"]}
    if not listed.keys() >= FIRST_PARTY or listed["sdpa"] != "ready":
        session.error(f"nsa backends list --json: {listed}")


KERNELS_WITHOUT_NUMPY = """
import dataclasses, importlib, pkgutil
import nsa_backend_triton
for module in pkgutil.walk_packages(nsa_backend_triton.__path__, "nsa_backend_triton."):
    if ".strict" not in module.name:  # the interpreter's room, which computes with numpy
        importlib.import_module(module.name)
from nsa_core import BlockGeometry, Request
from nsa_core.contract import SLOTS
from nsa_core.dispatch.registry import discover
from nsa_core.dispatch.probing import ask
entry = discover(safe=True).get("triton")
request = Request(
    slot="win", geometry=BlockGeometry(), n_heads=12, n_kv_heads=2, head_dim=64, v_head_dim=64,
    dtype="bfloat16", device="cuda", capability=(9, 0), needs_grad=True, batch=1, seq_len=4096,
)
answers = [ask(entry, dataclasses.replace(request, slot=slot)) for slot in SLOTS]
refused = [str(answer) for answer in answers if not answer.accepted]
assert not refused, refused
"""


def check_triton(session: nox.Session) -> None:
    """With triton, and without numpy: every kernel module imports, and the probe accepts a
    simulated sm_90 GPU.
    """
    session.run("python", "-c", KERNELS_WITHOUT_NUMPY)


def check_without_sdpa(session: nox.Session) -> None:
    """With the sdpa backend removed the list still works, and verify says what is missing: exit
    code 3 or 4.
    """
    for command, codes in (
        (["backends", "list"], [0, 4]),
        (["verify", "--sel", "sdpa"], [2, 3]),
        (["verify"], [3, 4]),
    ):
        text = str(session.run("nsa", *command, silent=True, success_codes=codes))
        session.log(f"nsa {' '.join(command)}: {text.strip()}")
        if "Traceback" in text or not text.strip():
            session.error(
                f"nsa {' '.join(command)} without nsa-backend-sdpa: a traceback or no message"
            )
        if command[0] == "verify" and "sdpa" not in text:
            session.error(f"nsa {' '.join(command)} without nsa-backend-sdpa does not name it")


# "nsa-bench[plot]==0.1.0", with or without an extra and an environment marker behind it
PIN = re.compile(r'"(nsa-[a-z0-9-]+(?:\[[a-z,-]+\])?)==[^"; ]+')
RANGE = re.compile(r'"(nsa-[a-z0-9-]+(?:\[[a-z,-]+\])?)>=[^",]+,<[^"; ]+')
# Both show a backend of somebody else's: its own version stays, its range of nsa-core moves.
TEMPLATES = (
    "packages/nsa-cli/src/nsa_cli/template/pyproject.toml.tmpl",
    "docs/write-a-backend.md",
)


def compatible_range(version: str) -> str:
    """Versions from ``version`` on that break nothing: up to the next minor one while major is 0,
    then up to the next major one.
    """
    major, minor = map(int, version.split(".")[:2])
    return f">={version},<{major + 1}" if major else f">={version},<0.{minor + 1}"


@nox.session(venv_backend="none")
def bump(session: nox.Session) -> None:
    """Write one version into all packages: `nox -s bump -- 0.2.0`. Installs nothing."""
    if len(session.posargs) != 1 or not re.fullmatch(
        r"\d+\.\d+\.\d+((a|b|rc)\d+)?", session.posargs[0]
    ):
        session.error(f"expected one version such as 0.2.0, got {session.posargs}")
    version = session.posargs[0]
    own = [path / "pyproject.toml" for path in PACKAGES]
    for file in (*own, *(ROOT / name for name in TEMPLATES)):
        text = file.read_text(encoding="utf-8")
        if file in own:
            text = re.sub(r'(?m)^version = "[^"]*"', f'version = "{version}"', text)
        text = PIN.sub(rf'"\1=={version}', text)
        text = RANGE.sub(rf'"\1{compatible_range(version)}', text)
        file.write_text(text, encoding="utf-8")
    session.log(f"{len(PACKAGES)} packages are now {version}; give it a heading in CHANGELOG.md")
