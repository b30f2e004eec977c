"""Commands keep working with plugins that crash, hang or exit while loading or probing (row 57)."""

from __future__ import annotations

import json
import pathlib

import pytest

PROBE_PLUGIN = """
from nsa_core.contract import BackendSpec, SlotSpec, hookimpl
@hookimpl
def nsa_register_backends():
    return BackendSpec("{name}", (1, 0), {{"win": SlotSpec("{name}:forward")}}, "{name}:probe", 99)
def probe(request):
    {statement}
"""
DEADLY = {
    "segfaults": ("import ctypes\nctypes.string_at(0)\n", "SIGSEGV"),
    "hangs": (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n",
        "within 3 s",
    ),
    "probecrash": (
        PROBE_PLUGIN.format(name="probecrash", statement="import ctypes; ctypes.string_at(0)"),
        "SIGSEGV while loading or probing",
    ),
    "probeexit": (
        PROBE_PLUGIN.format(name="probeexit", statement="import os; os._exit(0)"),
        "exit status 0 while loading or probing",
    ),
}
LIMIT = ("--plugin-limit", "3")
PATIENT = ("--time-limit", "600", "--cell-limit", "300")  # a busy machine measures late


def install(folder: pathlib.Path, name: str, source: str) -> None:
    """Install a distribution ``name`` with one plugin."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (folder / f"{name}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[nsa.backends]\n{name} = {name}\n")


@pytest.fixture
def site(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory with all of these plugins installed."""
    for name, (source, _) in DEADLY.items():
        install(tmp_path, name, source)
    return tmp_path


@pytest.mark.slow  # test_doctor.py covers crashes in the ordinary run
def test_row_57_doctor_reports_each_plugin(nsa, site) -> None:
    done = nsa(*LIMIT, "doctor", "--json", path=site)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["works"] is True
    problems = {problem["what"]: problem for problem in document["troubles"]}
    for name, (_, expected) in DEADLY.items():
        problem = problems[f"backend {name} 1.0 ({name})"]
        assert expected in problem["message"]
        assert problem["hint"]


@pytest.mark.slow
def test_row_57_list_and_verify_report_each_plugin(nsa, site) -> None:
    done = nsa(*LIMIT, "backends", "list", path=site)
    assert done.returncode == 0, done.stderr
    assert all(expected in done.stdout for _, expected in DEADLY.values())
    assert "sdpa" in done.stdout
    done = nsa(*LIMIT, "verify", "--win", "hangs", path=site)
    assert (done.returncode, DEADLY["hangs"][1] in done.stderr, "Traceback" in done.stderr) == (
        3,
        True,
        False,
    )


@pytest.mark.slow
def test_row_57_verify_checks_the_other_backends(nsa, site) -> None:
    done = nsa(*LIMIT, "verify", "--dtype", "float32", path=site)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr
    assert "0 failed" in done.stdout


PRINTED = "standard output belongs to the command"
# The number of tokens chooses what the kernel does; the other cases of the quick preset are right.
FAULTY_KERNEL = """
import ctypes, os, sys, time
from nsa_backend_sdpa import win
from nsa_core.contract import BackendSpec, SlotSpec, hookimpl
@hookimpl
def nsa_register_backends():
    slot = SlotSpec("faulty:forward", backward="faulty:backward", decode="faulty:decode")
    return BackendSpec("faulty", (1, 0), {{"win": slot}}, "faulty:probe", -9)
def probe(request):
    return []
def misbehave(tokens):
    print("standard output belongs to the command")
    if tokens == {exits}:
        sys.stdout.close(); sys.stderr.close(); os.close(1)
        raise SystemExit(0)
    if tokens == {ends}: os._exit(0)
    if tokens == {crashes}: ctypes.string_at(0)
    if tokens == {hangs}: time.sleep(600)
def forward(q, k, v, *, call):
    if q.dim() == 4 and q.shape[1] in {tokens}: misbehave(q.shape[1])
    return win.forward(q, k, v, call=call)
def backward(*tensors, call):
    return win.backward(*tensors, call=call)
def decode(q, k, v, *, call):
    if q.shape[0] == 1: misbehave({exits})
    from nsa_backend_sdpa import decode
    return decode.win(q, k, v, call=call)
"""


def faulty(exits: int, ends: int, crashes: int, hangs: int) -> str:
    """Return the source of a plugin that misbehaves at these numbers of tokens."""
    tokens = (exits, ends, crashes, hangs)
    return FAULTY_KERNEL.format(exits=exits, ends=ends, crashes=crashes, hangs=hangs, tokens=tokens)


@pytest.mark.slow
def test_verify_fails_the_rows_of_a_faulty_kernel_and_runs_the_others(nsa, tmp_path) -> None:
    install(tmp_path, "faulty", faulty(24, 48, 93, 77))
    file = tmp_path / "report.json"
    options = ("--device", "cpu", "--dtype", "float32", "--phase", "prefill", "--job-timeout", "20")
    done = nsa("verify", "--win", "faulty", *options, "--json", str(file), path=tmp_path)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr
    assert not any(line.startswith(PRINTED) for line in (done.stdout + done.stderr).splitlines())
    report = json.loads(file.read_text())
    assert report["backends"]["win"] == "faulty 1.0"
    failed = [f for f in report["findings"] if f["ok"] is False]
    by_case = {case: {f["detail"] for f in failed if f["case"] == case} for case in CASES}
    assert {f["case"] for f in failed} >= {*CASES}
    # Some checks also run shorter sequences, which are the lengths of other faults.
    reasons = [text for expected in CASES.values() for text in expected]
    assert all(any(text in f["detail"] for text in reasons) for f in failed), failed
    for case, expected in CASES.items():
        assert any(expected[0] in detail for detail in by_case[case]), case
    healthy = nsa("verify", "--win", "sdpa", *options[:6], "--json", str(tmp_path / "healthy.json"))
    assert healthy.returncode == 0, healthy.stderr
    checks = [
        {(f["check"], f["case"]) for f in document["findings"]}
        for document in (report, json.loads((tmp_path / "healthy.json").read_text()))
    ]
    # A job that ended without a result names its case, although the check may not apply to it. The
    # faulty backend does not take queries that begin inside a sequence.
    assert checks[0] >= {name for name in checks[1] if not is_partial_win(*name)}


def is_partial_win(check: str, case: str) -> bool:
    """Return whether a finding is one of win and of queries that begin inside a sequence."""
    return check == "partial queries" and case.startswith("slot=win")


CASES = {
    "S=w": ("it raised SystemExit: 0",),
    "S=2w": ("ended its process with exit status 0 in this check",),
    "h=1": ("killed its process with SIGSEGV in this check",),
    "h=4, Dk != Dv": (
        "did not end within 20 s",
        "not run: a check of this case with slot 'win', prefill, did not end within 20 s",
    ),
}
NAMED = """
from nsa_core.contract import BackendSpec, SlotSpec, hookimpl
print("standard output belongs to the command")
__import__("os").write(1, b"as its descriptor does")
@hookimpl
def nsa_register_backends():
    slot = SlotSpec("plugged:forward", backward="plugged:forward")
    return BackendSpec("named", (1, 0), {"win": slot}, "plugged:probe", -9)
def probe(request):
    print("standard output belongs to the command")
    if request.seq_len is None:
        STATEMENT
    return []
"""


def test_a_plugin_that_prints_leaves_standard_output_to_the_command(nsa, tmp_path) -> None:
    install(tmp_path, "plugged", NAMED.replace("STATEMENT", "raise KeyboardInterrupt"))
    done = nsa("backends", "list", "--json", path=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["backends"]}
    assert rows["named"]["status"] == "broken"
    assert "its probe raised KeyboardInterrupt" in str(rows["named"])
    assert "standard output belongs to the command" in done.stderr
    assert "as its descriptor does" in done.stderr


def test_a_backend_whose_probe_ends_its_process_is_known_by_its_name(nsa, tmp_path) -> None:
    install(tmp_path, "plugged", NAMED.replace("STATEMENT", "__import__('os')._exit(0)"))
    done = nsa("verify", "--win", "named", path=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "ended its process with exit status 0 while loading or probing" in done.stderr


IMPORTED = """
from nsa_core.contract import BackendSpec, SlotSpec, hookimpl
@hookimpl
def nsa_register_backends():
    slot = SlotSpec("crashing_kernel:forward", backward="crashing_kernel:backward")
    return BackendSpec("named", (1, 0), {"win": slot}, "plugged:probe", -9)
def probe(request):
    return []
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code", "doing"),
    [
        ("verify --win named --phase prefill", 3, "while planning"),
        ("bench --combo win=named --length 128 --phase forward", 3, "while planning"),
    ],
)
def test_a_crash_in_the_import_of_a_kernel_names_backend_and_module(
    nsa, tmp_path, command, code, doing
) -> None:
    install(tmp_path, "plugged", IMPORTED)
    (tmp_path / "crashing_kernel.py").write_text("import ctypes\nctypes.string_at(0)\n")
    done = nsa(*command.split(), "--device", "cpu", path=tmp_path)
    where = "backend 'named', import of module 'crashing_kernel'"
    text = " ".join((done.stdout + done.stderr).split())
    assert f"{where}: killed its process with SIGSEGV {doing}" in text
    assert done.returncode == code


@pytest.mark.slow
def test_a_probe_that_ends_its_process_for_some_requests_is_unavailable(nsa, tmp_path) -> None:
    source = NAMED.replace("request.seq_len is None", "request.needs_grad").replace(
        "STATEMENT", "__import__('os')._exit(0)"
    )
    install(tmp_path, "plugged", source)
    done = nsa("verify", "--win", "named", "--phase", "prefill", path=tmp_path)
    assert done.returncode == 3, done.stderr
    reason = "call of 'plugged:probe': ended its process with exit status 0 while planning"
    assert f"backend 'named', {reason}" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_bench_fails_the_cells_of_a_faulty_kernel_and_times_the_others(nsa, tmp_path) -> None:
    install(tmp_path, "faulty", faulty(1, 256, 2, 3))
    file = tmp_path / "result.json"
    options = ("--shape", "4/2/16", "--length", "128,256", "--phase", "forward", "--device", "cpu")
    combos = ("--combo", "win=faulty", "--combo", "sdpa", "--budget", "0.05", *PATIENT)
    done = nsa("bench", *options, *combos, "--json", str(file), path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(file.read_text())
    reasons = {
        (m["subject"], m["length"]): m["reason"]
        for m in result["measurements"]
        if m["kind"] == "combo"
    }
    assert [bool(reasons[key]) for key in (("sdpa", 128), ("sdpa", 256), ("win=faulty", 128))] == [
        False
    ] * 3, reasons
    assert "ended its process with exit status 0" in reasons["win=faulty", 256]


@pytest.mark.slow
def test_bench_decode_fails_the_gate_of_a_faulty_kernel(nsa, tmp_path) -> None:
    install(tmp_path, "faulty", faulty(1, 2, 3, 4))
    file = tmp_path / "result.json"
    options = ("decode", "--shape", "4/2/16", "--length", "128", "--device", "cpu")
    combos = ("--combo", "win=faulty", "--combo", "sdpa", "--budget", "0.05", *PATIENT)
    done = nsa("bench", *options, *combos, "--json", str(file), path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    combos = [m for m in json.loads(file.read_text())["measurements"] if m["kind"] == "combo"]
    reasons = {m["subject"]: m["reason"] for m in combos}
    assert (reasons["sdpa"], "failed" in reasons["win=faulty"]) == ("", True)


@pytest.mark.slow
def test_bench_decode_survives_a_kernel_that_crashes_late(nsa, tmp_path) -> None:
    """The gate and the first steps are right; the process ends while the step is timed."""
    late = """    if call.max_len == 128: calls.append(q.shape)
    if len(calls) > 9: os._exit(0)
    from nsa_backend_sdpa import decode"""
    source = faulty(1, 2, 3, 4).replace("def decode(", "calls = []\ndef decode_form(")
    source = source.replace("faulty:decode", "faulty:decode_form")
    source = source.replace("    if q.shape[0] == 1: misbehave(1)\n", "")
    install(tmp_path, "faulty", source.replace("    from nsa_backend_sdpa import decode", late))
    file = tmp_path / "result.json"
    options = ("decode", "--shape", "4/2/16", "--length", "128", "--device", "cpu")
    combos = ("--combo", "win=faulty", "--combo", "sdpa", "--budget", "0.05", *PATIENT)
    done = nsa("bench", *options, *combos, "--json", str(file), path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert all(gate["ok"] for gate in result["gates"])
    reasons = {m["subject"]: m["reason"] for m in result["measurements"]}
    assert (reasons["sdpa"], reasons["dense SDPA"]) == ("", "")
    assert "ended its process with exit status 0" in reasons["win=faulty"]


@pytest.mark.slow
def test_tune_fails_a_faulty_kernel_and_times_the_others(nsa, tmp_path) -> None:
    install(tmp_path, "faulty", faulty(1, 2, 97, 3))  # the gate has 97 tokens
    options = ("--shape", "2/1/8", "--blocks", "8,4,16,4,16", "--length", "48", "--device", "cpu")
    done = nsa("tune", *options, "--budget", "0.001", path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    where = "NOT CORRECT win=faulty: backend 'faulty', slot 'win', forward: "
    assert where + "killed its process with SIGSEGV in its gate" in text
    assert "8 choices for" in text  # of four slots, each for inference and training
