"""Everything a contributor or CI runs: `nox -s lint typecheck tests`, `full`, `wheels`, `bump`."""

from __future__ import annotations

import json
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
TRITON = "triton==3.6.0"  # docs/kernels.md holds what this compiler makes
RUFF = "ruff>=0.17,<0.18"  # a formatter's minor version changes what is formatted
MYPY = "mypy>=2.4,<3"
TEST_TOOLS = (
    "pytest>=8",
    "pytest-xdist>=3.5",
    "hypothesis>=6.100",
    "numpy",
    "matplotlib>=3.8",
    "safetensors>=0.4",
    "setuptools>=77",
    "wheel",
    f"{TRITON}; sys_platform == 'linux'",
)
# Two workers share two cores; and hundreds of child processes import what the first of them
# compiled.
FOR_TESTS = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}

nox.options.sessions = ["lint", "typecheck", "tests"]
nox.options.default_venv_backend = (  # uv, where present, would not follow pip's settings
    "virtualenv"
)
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True


def install(session: nox.Session, *packages: str) -> None:
    """Install torch first, then ``packages``.

    Torch goes first and pinned, so that nothing after it pulls in another one. An environment that
    already sees a torch of the user's keeps it. Nothing is compiled to byte code before it is
    imported: of torch's files most never are, and they take most of a minute.
    """
    probe = "import importlib.util as u; print(u.find_spec('torch') is not None)"
    if "True" not in str(session.run("python", "-c", probe, silent=True)):
        session.install("--no-compile", TORCH)
    session.install("--no-compile", *packages)


def install_ours(session: nox.Session) -> None:
    """Our five packages, editable. Their build needs setuptools in the environment."""
    session.install(
        "--no-build-isolation", *(arg for path in PACKAGES for arg in ("-e", str(path)))
    )


def run_pytest(session: nox.Session, selection: str) -> None:
    """pytest on two workers, in an environment that sees the user's torch; arguments after ``--``
    replace the rest.

    Kernels in triton's interpreter have a run of their own: the variable must be set before triton
    is imported, and in a run without it each of their files is a process that imports everything
    anew.
    """
    install(session, *TEST_TOOLS)
    install_ours(session)
    ordinary = ["-n", "2", "--dist", "worksteal", "--ignore", "tests/triton/interpreted"]
    interpreted = [
        "-n",
        "2",
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        "tests/triton/interpreted",
    ]
    runs = [(ordinary, FOR_TESTS), (interpreted, FOR_TESTS | {"TRITON_INTERPRET": "1"})]
    red = 0
    for arguments, environment in [(session.posargs, FOR_TESTS)] if session.posargs else runs:
        try:
            session.run("python", "-m", "pytest", "-m", selection, *arguments, env=environment)
        except nox.command.CommandFailed:  # what the other run says is worth the time
            red += 1
    if red:
        session.error("red tests, see above")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff check and ruff format --check over the repository."""
    session.install(RUFF)
    session.run("python", "-m", "ruff", "check", ".")
    session.run("python", "-m", "ruff", "format", "--check", ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """mypy, strict, on every package."""
    install(session, MYPY, "pluggy", "packaging", "typer", "rich", "pytest>=8", "matplotlib>=3.8")
    session.run("python", "-m", "mypy", *(str(path / "src") for path in PACKAGES))


@nox.session(venv_params=["--system-site-packages"])
def tests(session: nox.Session) -> None:
    """The ordinary suite."""
    run_pytest(session, "not slow and not gpu")


@nox.session(venv_params=["--system-site-packages"])
def full(session: nox.Session) -> None:
    """Every test, the slow ones too; those that need a GPU run where there is one."""
    run_pytest(session, "")


@nox.session(reuse_venv=False)
def wheels(session: nox.Session) -> None:
    """Build all wheels, install them in a fresh environment, and use it; then with triton, then
    without sdpa.
    """
    install(session, "setuptools>=77", "wheel")
    dist = pathlib.Path(session.create_tmp()) / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for path in PACKAGES:
        # a file deleted since the last build would come back
        shutil.rmtree(path / "build", ignore_errors=True)
    session.run(
        "python",
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(dist),
        *map(str, PACKAGES),
    )
    built = sorted(dist.glob("*.whl"))
    for wheel in built:
        check_wheel(session, wheel)
    session.install(*map(str, built))
    session.chdir(dist)  # away from the sources, so that only the wheels are imported
    check_listing(session)
    session.run("nsa", "verify")  # with the wheels' own dependencies and nothing else
    if sys.platform == "linux":
        session.install("--no-compile", TRITON)
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


def check_listing(session: nox.Session) -> None:
    """`nsa backends list --json` sees every backend of ours, and sdpa is ready."""
    text = session.run("nsa", "backends", "list", "--json", silent=True, stderr=None)
    listed = {entry["name"]: entry["status"] for entry in json.loads(str(text))["backends"]}
    if not listed.keys() >= FIRST_PARTY or listed["sdpa"] != "ready":
        session.error(f"nsa backends list --json: {listed}")


KERNELS_WITHOUT_NUMPY = """
import dataclasses, importlib, importlib.util, pkgutil
assert importlib.util.find_spec("numpy") is None, "this check needs an environment without numpy"
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


@nox.session(venv_backend="none")
def bump(session: nox.Session) -> None:
    """Write one version into all five packages: `nox -s bump -- 0.2.0`. Installs nothing."""
    if len(session.posargs) != 1 or not re.fullmatch(
        r"\d+\.\d+\.\d+((a|b|rc)\d+)?", session.posargs[0]
    ):
        session.error(f"give one version such as 0.2.0, got {session.posargs}")
    version = session.posargs[0]
    for path in PACKAGES:
        file = path / "pyproject.toml"
        text = re.sub(
            r'(?m)^version = "[^"]*"', f'version = "{version}"', file.read_text(encoding="utf-8")
        )
        text = re.sub(r'"(nsa-[a-z0-9-]+)==[^"]*"', rf'"\1=={version}"', text)
        file.write_text(text, encoding="utf-8")
    session.log(f"{len(PACKAGES)} packages are now {version}; give it a heading in CHANGELOG.md")
