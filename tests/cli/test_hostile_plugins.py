"""Whatever a plugin does is failed rows with its name; the others run; the exit code is not 0."""

from __future__ import annotations

import json
import pathlib
import sys
import unicodedata

import pytest

from hostile import (
    AT_IMPORT,
    CRASH,
    EXIT,
    IN_KERNEL,
    IN_PROBE,
    PRINTED,
    PRINTS,
    faulty,
    plugin,
)
from installed import install
from nsa_verify.run import suite

LIMIT = ("--plugin-limit", "3")
CPU = ("--device", "cpu")
PATIENT = ("--time-limit", "600", "--cell-limit", "300")  # a busy machine measures late
BENCH = (*("bench", "--shape", "4/2/16", "--length", "128", *CPU), *("--budget", "0.05", *PATIENT))


@pytest.fixture
def site(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty directory on the path, for this process and its children."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    return folder


@pytest.fixture
def hostile(site: pathlib.Path) -> pathlib.Path:
    """The directory with every plugin that misbehaves while it loads or in its probe."""
    for name, (statement, _) in AT_IMPORT.items():
        install(site, name, plugin(name, at_import=f"print({PRINTED!r}); {statement}"))
    for name, (statement, _) in IN_PROBE.items():
        install(site, name, plugin(name, in_probe=f"{PRINTS}; {statement}", priority=99))
    return site


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_row_57_list_and_explain_name_each_plugin(nsa, hostile, monkeypatch) -> None:
    done = nsa(*LIMIT, "backends", "list", "--json")
    assert done.code == 0, done.err
    rows = {row["name"]: row for row in json.loads(done.out)["backends"]}
    for name, (_, expected) in (AT_IMPORT | IN_PROBE).items():
        assert (name, rows[name]["status"]) == (name, "broken")
        assert expected in rows[name]["sentence"]
    assert rows["sdpa"]["status"] == "ready"
    assert not {*AT_IMPORT, *IN_PROBE} & sys.modules.keys()
    monkeypatch.setenv("NSA_PLUGINS", "probecrash")
    done = nsa(*LIMIT, "backends", "explain", "--win", "probecrash", *CPU)
    assert done.code == 3
    assert IN_PROBE["probecrash"][1] in one_line(done.out)


@pytest.mark.slow
def test_row_57_doctor_names_each_plugin(nsa, hostile) -> None:
    done = nsa(*LIMIT, "doctor", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["works"] is True
    sentences = {row["name"]: row["sentence"] for row in document["backends"]}
    for name, (_, expected) in (AT_IMPORT | IN_PROBE).items():
        assert expected in sentences[name]
        assert any(name in trouble["what"] and trouble["hint"] for trouble in document["troubles"])


@pytest.mark.slow
def test_row_57_verify_and_tune_run_the_other_backends(nsa, hostile, monkeypatch) -> None:
    case = ("--case", "win w=3 tokens=5")
    for name, (_, expected) in (AT_IMPORT | IN_PROBE).items():
        monkeypatch.setenv("NSA_PLUGINS", name)
        done = nsa(*LIMIT, "verify", "--win", name, *CPU, *case)
        assert (done.code, "Traceback" in done.err) == (3, False)
        assert expected in one_line(done.err)
    monkeypatch.delenv("NSA_PLUGINS")
    done = nsa(*LIMIT, "verify", *CPU, *case)
    assert done.code == 0, done.out + done.err
    tiny = ("--shape", "2/1/8", "--blocks", "8,4,16,4,16", "--length", "48", *CPU)
    done = nsa(*LIMIT, "tune", *tiny, "--budget", "0.001")
    assert done.code == 1, done.out + done.err
    for name in ("probeexit", "probecrash", "probehang"):
        assert f"win, training, {name} 1.0: failed: {IN_PROBE[name][1]}" in one_line(done.out)
    assert "8 choices for" in one_line(done.out)  # of four slots, each for two uses


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `nsa verify` run parity on small cases only."""
    cases, jobs = ("S<l", "S=w", "S=2w", "h=1"), suite.jobs

    def few(*arguments, **options) -> list[suite.Job]:
        every = jobs(*arguments, **options)
        return [job for job in every if job.name == "parity" and job.case.name in cases]

    monkeypatch.setattr(suite, "jobs", few)


def verified(nsa, tmp_path: pathlib.Path, *options: str) -> tuple[int, dict]:
    """Run `nsa verify` in float32 on the CPU; return its exit code and report."""
    file = tmp_path / "report.json"
    command = ("verify", *CPU, "--dtype", "float32", "--phase", "prefill", "--cases", "0")
    done = nsa(*command, *options, "--json", str(file), "--force")
    assert not [t for t in (done.out + done.err).splitlines() if t.startswith(PRINTED)]
    return done.code, json.loads(file.read_text())


def test_verify_fails_the_rows_of_a_faulty_kernel_and_runs_the_others(
    nsa, site, tmp_path, few_checks
) -> None:
    install(site, "faulty", faulty({n: what for n, (what, _) in IN_KERNEL.items()}))
    code, report = verified(nsa, tmp_path, "--win", "faulty")
    assert code == 1
    assert report["backends"]["win"] == "faulty 1.0"
    failed = [f for f in report["findings"] if f["ok"] is False]
    reasons = {reason for _, reason in IN_KERNEL.values()}
    seen = {reason for f in failed for reason in reasons if reason in f["detail"]}
    assert seen == reasons
    assert all("backend 'faulty'" in f["detail"] for f in failed), failed
    code, healthy = verified(nsa, tmp_path, "--win", "sdpa")
    assert code == 0
    checks = [{(f["check"], f["case"]) for f in r["findings"]} for r in (report, healthy)]
    assert checks[0] >= checks[1]


@pytest.mark.slow
def test_every_combination_runs_in_the_process_of_its_plugin(
    nsa, site, tmp_path, few_checks
) -> None:
    for name in ("one", "two"):
        tokens = "q.shape[q.dim() - 3]"
        crash = f"{tokens} == 48 and exec({CRASH!r})" if name == "two" else "pass"
        install(site, name, plugin(name, in_forward=crash))
    code, report = verified(
        nsa, tmp_path, *("--every-combination", "--cmp", "sdpa", "--sel", "sdpa")
    )
    assert code == 1
    failed = {
        combination["backends"]["win"]: [f for f in combination["findings"] if f["ok"] is False]
        for combination in report["combinations"]
    }
    assert {name: bool(rows) for name, rows in failed.items()} == {
        "one 1.0": False,
        "two 1.0": True,
        **{name: False for name in failed if name.startswith("sdpa")},
    }
    assert all("SIGSEGV" in f["detail"] for f in failed["two 1.0"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["verify --device cpu --win named", f"{' '.join(BENCH)} --combo win=named"]
)
def test_a_crash_in_the_import_of_a_kernel_names_the_backend(nsa, site, command) -> None:
    install(site, "named", plugin("named", kernel="crashing_kernel"))
    (site / "crashing_kernel.py").write_text(f"{CRASH}\n")
    done = nsa(*command.split())
    reason = "its kernel does not load: killed its process with SIGSEGV in its kernel"
    assert f"named 1.0: not supported: {reason}" in one_line(done.out + done.err)
    assert done.code == 3


@pytest.mark.slow
@pytest.mark.parametrize("command", [("bench",), ("bench", "decode")], ids=" ".join)
def test_bench_fails_the_cells_of_a_faulty_kernel_and_times_the_others(
    nsa, site, tmp_path, command
) -> None:
    """The gate is right; the process ends while the kernel is timed, or in the gate of decode."""
    install(
        site,
        "faulty",
        plugin("faulty", in_decode=EXIT, in_forward=f"q.shape[1] == 128 and exec({EXIT!r})"),
    )
    file = tmp_path / "result.json"
    combos = ("--combo", "win=faulty", "--combo", "sdpa")
    done = nsa(*command, *BENCH[1:], *combos, "--json", str(file))
    assert done.code == 1, done.out + done.err
    measured = [m for m in json.loads(file.read_text())["measurements"] if m["kind"] == "combo"]
    reasons = {m["subject"]: m["reason"] for m in measured}
    assert reasons["sdpa"] == ""
    gate = json.loads(file.read_text())["gates"]
    failures = str([g["failures"] for g in gate if g["combo"] == "win=faulty"])
    assert "ended its process with exit status 0" in reasons["win=faulty"] + failures
    assert reasons["win=faulty"]


@pytest.mark.slow
def test_text_of_a_plugin_is_printed_without_control_characters(nsa, site, few_checks) -> None:
    nasty = "\x1b[2J\x07[bold]boo[/]\r\n\u202e"
    refusal = f"from nsa_core.contract import Reason; return [Reason('x', {nasty!r}, {nasty!r})]"
    install(site, "refusing", plugin("refusing", in_probe=refusal))
    install(site, "raising", plugin("raising", in_forward=f"raise RuntimeError({nasty!r})"))
    install(site, "unloadable", plugin("unloadable", at_import=f"raise ValueError({nasty!r})"))
    metadata = site / "refusing-1.0.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: refusing\nVersion: 1\x1b[2J\x07\u202e\n")
    commands = {
        "backends list": 0,
        "backends list --no-probe": 0,
        "backends show refusing": 0,
        "backends show unloadable": 0,
        "backends explain --win refusing --device cpu": 3,
        "doctor": 0,
        "verify --device cpu --win refusing": 3,
        "verify --device cpu --dtype float32 --phase prefill --cases 0 --win raising": 1,
    }
    for command, code in commands.items():
        done = nsa(*LIMIT, *command.split())
        assert done.code == code, (command, done)
        text = done.out + done.err
        assert r"\x1b[2J" in text, command
        unsafe = {c for c in text if unicodedata.category(c) in ("Cc", "Cf") and c != "\n"}
        assert not unsafe, command
        if "--no-probe" not in command:
            assert "[bold]boo[/]" in text, command
