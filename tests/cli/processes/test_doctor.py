"""`nsa doctor` reports each problem with a fix and keeps running."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from installed import install
from nsa_cli import health

SEGFAULTS = "import ctypes\nctypes.string_at(0)\n"
GPU = {"name": "Some GPU", "capability": [9, 0], "memory_bytes": 80 * 2**30}
TORCH = {
    "status": "ok",
    "version": "2.13.0+cpu",
    "cuda": "13.0",
    "hip": None,
    "gpus": [],
    "built_for": [],
    "cuda_available": True,
    "computes": True,
}


REGISTERS = """
from nsa_core.contract import BackendSpec, SlotSpec, hookimpl
@hookimpl
def nsa_register_backends():
    return BackendSpec(NAME, (1, 0), {"win": SlotSpec(HOME + ":f")}, HOME + ":probe", -9)
"""


@pytest.fixture(scope="module")
def broken_site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory of broken distributions: plugins, probes, flash_attn and one of our backends.

    One plugin segfaults on import, one in its probe; another one's probe raises. flash_attn
    segfaults, and the probe of our backend fa2 raises.
    """
    folder = tmp_path_factory.mktemp("broken_site")
    install(folder, "segfaults", SEGFAULTS)
    for name, statement in (("prober", SEGFAULTS.replace("\n", ";")), ("raiser", "1 // 0")):
        source = f"NAME = HOME = {name!r}\n{REGISTERS}def probe(request):\n    {statement}\n"
        install(folder, name, source)
    home = "/" + "home" + "/janedoe"
    install(folder, "leaky", f"raise RuntimeError('cannot read {home}/lib/libx.so.1, ask janedoe')")
    (folder / "flash_attn.py").write_text(SEGFAULTS)
    # shadows the installed distribution
    install(folder, "nsa-backend-fa2", "raise RuntimeError('not this one')")
    (folder / "toy_fa2.py").write_text(
        f"NAME, HOME = 'fa2', 'toy_fa2'\n{REGISTERS}def probe(request):\n    1 // 0\n"
    )
    (folder / "nsa_backend_fa2-1.0.dist-info" / "entry_points.txt").write_text(
        "[nsa.backends]\nfa2 = toy_fa2\n"
    )
    return folder


@pytest.fixture(scope="module")
def report(
    broken_site: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict, dict[str, dict[str, str]]]:
    """The document of `nsa doctor --json` with ``broken_site``, and its problems by subject.

    One run serves several tests, because it starts a process per library.
    """
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("NSA_")},
        "PYTHONPATH": os.pathsep.join([str(broken_site), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }
    done = subprocess.run(
        [sys.executable, "-m", "nsa_cli", "doctor", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    document = json.loads(done.stdout)
    return document, {problem["what"]: problem for problem in document["troubles"]}


@pytest.mark.slow
def test_doctor_reports_a_working_environment(nsa) -> None:
    done = nsa("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert document["works"] is True
    assert document["torch"]["status"] == "ok"
    assert document["variables"] == {
        "NSA_PLUGINS": None,
        "NSA_DISABLE_PLUGINS": None,
        "NSA_CHECK": None,
    }
    assert {b["name"] for b in document["backends"]} >= {"sdpa", "triton", "fa2"}
    assert set(document["attention"]["cpu"]["backends"]) == {
        "cmp",
        "select",
        "sel",
        "win",
        "combine",
    }


@pytest.mark.slow
def test_crashes_are_reported_with_their_signal(report) -> None:
    document, problems = report
    assert "SIGSEGV" in problems["backend segfaults 1.0 (segfaults)"]["message"]
    assert "SIGSEGV" in problems["probe of backend prober"]["message"]
    assert "ZeroDivisionError" in problems["probe of backend raiser"]["message"]
    assert "NSA_DISABLE_PLUGINS=raiser" in problems["probe of backend raiser"]["hint"]
    assert "SIGSEGV" in problems["flash-attn"]["message"]
    assert all(problem["hint"] for problem in document["troubles"])


@pytest.mark.slow
def test_an_error_in_our_own_probe_is_reported_to_this_project(nsa, report, broken_site) -> None:
    problem = report[1]["probe of backend fa2"]
    assert "ZeroDivisionError" in problem["message"]
    assert "this is a bug in NSA itself" in problem["message"]
    shown = nsa("--safe", "backends", "show", "fa2", path=broken_site).stdout
    assert (
        "this is a bug in NSA itself: please report it with the output of `nsa doctor --report`"
        in shown
    )
    assert "broken: its probe raised ZeroDivisionError" in shown
    assert "author" not in shown


@pytest.mark.slow
def test_a_broken_torch_exits_with_code_4_and_a_fix(nsa, tmp_path) -> None:
    (tmp_path / "torch.py").write_text(
        "raise OSError('libcudart.so.12: cannot open shared object file')"
    )
    done = nsa("doctor", path=tmp_path)
    assert done.returncode == 4
    assert "libcudart.so.12" in done.stdout
    assert "pip install --force-reinstall torch" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.count("torch cannot be imported") == 4  # three backends and the GPU


@pytest.mark.slow
def test_without_a_backend_for_a_slot_the_problem_is_one_sentence(nsa, monkeypatch) -> None:
    monkeypatch.setenv("NSA_DISABLE_PLUGINS", "sdpa")
    done = nsa("doctor", "--json")
    assert done.returncode == 4
    (problem,) = json.loads(done.stdout)["troubles"]
    assert (problem["what"], problem["message"], problem["hint"]) == (
        "attention",
        "no backend takes cmp, select, sel, win, combine",
        "nsa backends explain; nsa verify",
    )


@pytest.mark.slow
def test_the_report_prints_no_path_and_no_user(nsa, broken_site, monkeypatch) -> None:
    monkeypatch.setenv("LOGNAME", "janedoe")
    monkeypatch.setenv("NSA_DISABLE_PLUGINS", "raiser")  # as the doctor advises
    done = nsa("doctor", "--report", path=broken_site)
    assert done.returncode == 0
    assert "cannot read .../libx.so.1, ask USER" in done.stdout
    assert "janedoe" not in done.stdout
    assert "NSA_DISABLE_PLUGINS: 'raiser'" in done.stdout
    assert "runs on cpu: yes" in done.stdout
    assert done.stdout.startswith("```\n")
    assert done.stdout.endswith("```\n")


def missing() -> dict:
    import nonesuch_module

    return nonesuch_module


def test_an_import_that_hangs_exits_or_raises_is_a_broken_library() -> None:
    calls = (functools.partial(time.sleep, 60), functools.partial(os._exit, 0), missing, dict)
    imports = [health.LibraryImport("nonesuch", "json", call) for call in calls]
    hangs, exits, raises, fine = (library.facts(4.0) for library in imports)
    assert (hangs["status"], hangs["ended"]) == ("broken", "hung")
    assert "4 s" in hangs["error"]
    assert exits["ended"] == "crashed"
    assert "exit status 0 during the import test" in exits["error"]
    error = "ModuleNotFoundError: No module named 'nonesuch_module'"
    assert raises == {"version": None, "status": "broken", "error": error}
    assert fine == {"version": None, "status": "ok", "error": ""}
    absent = health.LibraryImport("nonesuch", "nonesuch_module", missing).facts(4.0)
    assert absent["status"] == "missing"


@pytest.mark.parametrize(
    ("facts", "has_device_node", "messages"),
    [
        ({}, False, []),
        ({"cuda": None}, True, ["built for the CPU only"]),
        ({"cuda_available": False}, True, ["finds no usable GPU"]),
        ({"cuda_available": False}, False, []),
        ({"gpus": [GPU], "built_for": ["sm_80", "sm_90"]}, True, []),
        ({"gpus": [GPU], "built_for": ["sm_80", "compute_80"]}, True, []),
        (
            {"gpus": [GPU], "built_for": ["sm_80", "sm_86"]},
            True,
            ["is sm_90, and this torch is built for sm_80"],
        ),
        ({"gpus": [GPU], "built_for": ["sm_100", "sm_120"]}, True, ["built for sm_100"]),
        ({"gpus": [GPU], "computes": False}, True, ["product on the GPU is wrong"]),
    ],
)
def test_problems_of_torch_and_the_gpu(
    monkeypatch, facts: dict, has_device_node: bool, messages: list[str]
) -> None:
    monkeypatch.setattr(health, "has_nvidia_device", lambda: has_device_node)
    problems = health._torch_problems({**TORCH, **facts})
    assert len(problems) == len(messages), problems
    assert all(
        text in problem["message"] and problem["hint"] for text, problem in zip(messages, problems)
    )


def test_problems_of_an_old_missing_or_crashing_torch() -> None:
    (old,) = health._torch_problems({**TORCH, "version": "2.7.1"})
    assert "2.7.1 is too old, nsa-core needs torch>=2.8" in old["message"]
    broken = {"version": "2.13.0", "status": "broken", "error": "killed with SIGILL"}
    (crash,) = health._torch_problems(broken | {"ended": "crashed"})
    assert "SIGILL" in crash["message"]
    assert crash["hint"] == "pip install --force-reinstall torch"
    (slow,) = health._torch_problems(broken | {"ended": "hung"})
    assert slow["hint"].startswith("nsa doctor --limit 300 ")
    (missing,) = health._torch_problems({"version": None, "status": "missing", "error": ""})
    assert missing["hint"] == "pip install torch"


def test_broken_triton_and_flash_attn_are_problems_with_a_gpu_only() -> None:
    absent = {"status": "missing", "error": "no x"}
    broken = {"status": "broken", "error": "ImportError: libcuda"}
    assert health._optional_problems(absent, absent, gpu=False) == []
    assert health._optional_problems(broken, absent, gpu=False) == []
    (problem,) = health._optional_problems(broken, {"status": "ok", "error": ""}, gpu=True)
    assert "libcuda" in problem["message"]
    (crashed,) = health._optional_problems(broken | {"ended": "crashed"}, absent, gpu=False)
    assert "libcuda" in crashed["message"]
