"""Behaviour that all commands share (row 60): help, version, speed, errors, files and signals."""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import signal
import stat
import subprocess
import sys
import time
import warnings

import pytest
import typer

from installed import install
from nsa_cli import __main__, output
from nsa_cli.app import app
from nsa_cli.choices import tokens
from nsa_core.errors import BackendUnavailable, InvalidInput, NSAError, Unsupported


@pytest.mark.parametrize("arguments", [("--help",), ()])
def test_help_names_the_paper_and_distinguishes_dsa(nsa, arguments):
    done = nsa(*arguments)
    words = " ".join(done.out.split())
    assert done.code == 0
    assert "arXiv 2502.11089" in words
    assert "not DeepSeek Sparse Attention (DSA)" in words
    for text in ("backends", "verify", "--safe", "Exit codes: 0 ok; 1 a check failed; 2 usage"):
        assert text in words
    assert "..." not in done.out.replace("[ARGS]...", "")  # no description is truncated


def test_version_option_prints_the_version(nsa):
    from importlib.metadata import version

    assert nsa("--version").out == f"nsa {version('nsa-cli')}\n"


def test_help_and_metadata_import_no_torch():
    code = """
import sys
from nsa_cli.app import main
for command in sys.argv[1:]:
    try:
        main(command.split())
    except SystemExit as exit_request:
        assert not exit_request.code, (command, exit_request.code)
    assert "torch" not in sys.modules and "numpy" not in sys.modules, command
"""
    names = ("", "backends", "backends list", "verify", "bench", "tune", "train", "generate")
    names += ("convert", "inspect", "doctor")
    commands = [*(f"{name} --help" for name in names), "--version"]
    commands += ["backends list --no-probe", "backends list --no-probe --json"]
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


MINIMAL_COMMAND = """
import typer
from rich.console import Console
from rich.table import Table

def main(word: str = "x", count: int = 1) -> None:
    table = Table("word")
    table.add_row(word * count)
    Console().print(table)

typer.run(main)
"""


def cpu_seconds(byte_code: pathlib.Path, *arguments: str) -> float:
    variables = {"PYTHONPYCACHEPREFIX": str(byte_code), "PYTHONDONTWRITEBYTECODE": ""}
    child = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.DEVNULL, env=os.environ | variables
    )
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["--help"], ["backends", "list", "--no-probe"]], ids=" ".join
)
def test_help_and_metadata_take_at_most_300_ms(arguments, tmp_path):
    """The best CPU time of five runs is below 300 ms, or twice that of a minimal command.

    The minimal command uses typer and rich for two options and a table. Both commands run in turn,
    because on a slow CPU these libraries alone take most of 300 ms. Their first runs compile the
    byte code, which an installation may lack.
    """
    command = minimal = math.inf
    for _ in range(5):
        command = min(command, cpu_seconds(tmp_path, "-m", "nsa_cli", *arguments))
        if command < 0.3:
            return
        minimal = min(minimal, cpu_seconds(tmp_path, "-c", MINIMAL_COMMAND))
    assert command < max(0.3, 2 * minimal), f"{command:.3f} s, minimal command {minimal:.3f} s"


def nothing_usable() -> BackendUnavailable:
    error = BackendUnavailable("none")
    error.nothing_usable = True
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NSAError("backend 'x' returned rubbish"), 1),
        (InvalidInput("window_size must be >= 1, got 0"), 2),
        (typer.BadParameter("no"), 2),
        (Unsupported("no backend takes win\n  request: x\n  win:\n    a: b"), 3),
        (BackendUnavailable("fa2"), 3),
        (nothing_usable(), 4),
        (ModuleNotFoundError("No module named 'torch'"), 4),
        (OSError(28, "No space left on device"), 5),
        (OSError(11, "Resource temporarily unavailable"), 4),
        (KeyboardInterrupt(), 130),
        (KeyboardInterrupt("SIGTERM"), 143),
        (KeyboardInterrupt("SIGHUP"), 129),
        (BrokenPipeError(32, "Broken pipe"), 141),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_errors_become_exit_codes(error, code, capsys):
    with pytest.raises(SystemExit) as caught, output.exit_codes():
        raise error
    assert caught.value.code == code
    err = capsys.readouterr().err
    assert err.startswith("nsa: ")
    # one line, plus the line breaks of the message
    assert err.count("\n") == 1 + str(error).count("\n")


def test_unexpected_exceptions_are_not_caught():
    with pytest.raises(ZeroDivisionError), output.exit_codes():
        _ = 1 // 0


def test_control_characters_in_a_message_are_escaped(capsys):
    with pytest.raises(SystemExit), output.exit_codes():
        raise Unsupported("first\n  toy: \x1b[2J\x07[bold]boo[/]\u202e")
    assert capsys.readouterr().err == "nsa: first\n  toy: \\x1b[2J\\x07[bold]boo[/]\\u202e\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_texts_and_tables_escape_control_characters_and_markup(is_terminal, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    nasty = "\x1b[2J\x07[bold]boo[/]\u202e"
    console = output.console()
    output.print_text(console, nasty)
    output.print_table(console, ["name", "note"], [[nasty, "first\nsecond"]], nasty)
    console.print(nasty)
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)  # the styles of a terminal
    safe = r"\x1b[2J\x07[bold]boo[/]\u202e"
    assert [line.rstrip() for line in out.split("\n")] == [
        *(safe, safe),
        f"{'name':{len(safe)}}  note",
        rf"{safe}  first\nsecond",
        *(safe, ""),
    ]


def test_row_60_ctrl_c_prints_one_line_and_ends_the_children(start, tmp_path):
    site, pid_file = tmp_path / "site", tmp_path / "pid"
    site.mkdir()
    source = (
        "import os, pathlib,"
        f" time\npathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    install(site, "toy-hangs", source)
    child = start(
        "backends",
        "list",
        env={"PYTHONPATH": str(site) + ":" + os.environ.get("PYTHONPATH", "")},
        start_new_session=True,
        # In a background job of a shell, SIGINT is ignored and child processes inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    waited = time.monotonic() - deadline + 60
    assert child.poll() is None, f"ended by itself within {waited:.1f} s: {child.communicate()}"
    os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (130, "nsa: interrupted by SIGINT\n"), (
        f"after {waited:.1f} s: {out}"
    )
    state = pathlib.Path(f"/proc/{pid_file.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_row_60_an_existing_output_file_is_refused_without_force(tmp_path):
    file = tmp_path / "result.json"
    output.write_atomic(file, "one\n")
    with pytest.raises(InvalidInput, match="exists; give --force"):
        output.write_atomic(file, "two\n")
    with pytest.raises(InvalidInput, match="exists; give --force"):
        output.check_writable("--json", file)
    assert file.read_text() == "one\n"
    output.check_writable("--json", file, True)
    output.write_atomic(file, "two\n", True)
    assert file.read_text() == "two\n"
    assert list(tmp_path.iterdir()) == [file]


def test_row_60_a_file_created_during_the_write_is_not_overwritten(tmp_path, monkeypatch):
    file, fsync = tmp_path / "result.json", os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (fsync(number), file.write_text("theirs")))
    with pytest.raises(InvalidInput, match="exists"):
        output.write_atomic(file, "ours")
    assert file.read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("force", [False, True])
def test_row_60_files_are_written_completely_or_not_at_all(tmp_path, monkeypatch, force):
    file = tmp_path / "result.json"
    if force:
        file.write_text("old")

    def raise_no_space(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", raise_no_space)
    with pytest.raises(OSError, match="No space"):
        output.write_atomic(file, "new", force)
    assert [f.read_text() for f in tmp_path.iterdir()] == (["old"] if force else [])


def test_row_60_links_are_followed_and_devices_are_refused(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    output.write_atomic(link, "new", force=True)
    assert link.is_symlink()
    assert real.read_text() == "new"
    for path, problem in (("/dev/null", "not a plain file"), (str(tmp_path), "a folder; give")):
        with pytest.raises(InvalidInput, match=f"--json {path} is {problem}"):
            output.check_writable("--json", pathlib.Path(path), True)
        with pytest.raises(InvalidInput, match=f"{path} is not a plain file"):
            output.write_atomic(path, "x", True)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_row_60_a_missing_directory_is_refused_before_the_run(tmp_path):
    output.check_writable("--json", None)
    output.check_writable("--json", tmp_path / "new.json")
    with pytest.raises(InvalidInput, match="does not exist"):
        output.check_writable("--json", tmp_path / "absent" / "new.json")


@pytest.mark.parametrize("expected", [80.0, 150.0])
def test_an_expected_time_gives_the_time_left_from_the_first_step_on(monkeypatch, capsys, expected):
    clock = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: clock[0])
    with output.progress(11, 22.0, expected) as advance:
        for at in (40.0, 50.0, 60.0, 70.0):  # 30 s of imports, then steps of 10 s
            clock[0] = at
            advance("step", 2.0)
    lines = capsys.readouterr().err.splitlines()
    left = [int(re.search(r"about (\d+) (s|min) left", line)[1]) for line in lines]
    assert left == {80.0: [73, 85, 77, 68], 150.0: [2, 94, 82, 71]}[expected]  # the first: 136 s


def test_no_time_left_is_shown_in_the_first_percent(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: clock[0])
    with output.progress(200) as advance:
        for _ in range(3):
            clock[0] += 10.0
            advance("step")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["1/200 step", *(f"{n}/200 step, about 33 min left" for n in (2, 3))]


def test_progress_prints_nothing_for_short_runs_without_a_terminal(capsys):
    with output.progress(3) as advance:
        for label in "abc":
            advance(label)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_warnings_of_the_compiler_of_flash_attention_4_are_not_shown(monkeypatch, recwarn):
    def run():
        for module in ("cutlass.base_dsl.dsl", "other.cutlass"):
            warnings.warn_explicit(f"of {module}", UserWarning, "dsl.py", 1, module)

    monkeypatch.setattr("nsa_cli.app.main", run)
    monkeypatch.setattr(sys, "warnoptions", [])
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # main replaces it
    __main__.main()
    assert [str(w.message) for w in recwarn] == ["of other.cutlass"]


def test_our_warnings_are_sentences_and_those_of_other_code_have_a_source_line(start, tmp_path):
    file = tmp_path / "cache" / "nsa" / "tuned.json"
    file.parent.mkdir(parents=True)
    file.write_text("{")
    _, shown = start("backends", "list").communicate()
    assert shown.startswith(f"nsa: warning: {file} is not a file of nsa tune and is not used: ")
    assert shown.endswith("; nsa tune --reset deletes it\n")
    assert shown.count("\n") == 1
    other = output.format_warning("text", UserWarning, "/other/module.py", 3, "f()")
    assert other == "/other/module.py:3: UserWarning: text\n  f()\n"
    ours = output.format_warning("a\nb", UserWarning, "/site/nsa_core/module.py", 3)
    assert ours == "nsa: warning: a b\n"


def test_environment_is_json_and_names_versions():
    environment = json.loads(json.dumps(output.environment()))
    assert {"nsa-core", "nsa-cli", "torch"} <= set(environment["versions"])
    assert environment["python"]
    assert environment["platform"]


def options_of(command, path: str = "nsa"):
    """Yield (command line, option) of a command and of all below it."""
    for name, below in getattr(command, "commands", {}).items():
        yield from options_of(below, f"{path} {name}")
    yield from ((path, param) for param in command.params if param.param_type_name == "option")


def test_options_of_tokens_take_k_and_m_in_every_command(nsa):
    lists = {("nsa bench", "--length")}  # see the tests of parse_lengths
    help_texts = r"[Tt]okens per|in tokens|number of tokens|this many tokens"
    found = {
        (path, option.opts[0])
        for path, option in options_of(typer.main.get_command(app))
        if re.search(help_texts, option.help) and "Block sizes" not in option.help
    }
    assert {
        *lists,
        ("nsa bench decode", "--page-size"),
        ("nsa train", "--length"),
        ("nsa convert", "--length"),
        ("nsa tune", "--length"),
        ("nsa generate", "--max-new-tokens"),
        ("nsa inspect", "--max-tokens"),
        ("nsa backends explain", "--seq-len"),
        ("nsa backends explain", "--page-size"),
    } <= found
    for path, option in found - lists:
        done = nsa(*path.split()[1:], option, "2048M")
        assert done.code == 2
        error = f"{option}: '2048M' is not a number of tokens from"
        assert error in done.err, path


@pytest.mark.parametrize(("text", "value"), [("1M", 1 << 20), ("64k", 1 << 16), (256, 256)])
def test_an_option_of_tokens_returns_an_integer(text, value):
    assert tokens(2)(text) == value
    for wrong in ("1", "-1", "1.5k", "2147483648", "9" * 5000):
        with pytest.raises(typer.BadParameter, match="is not a number of tokens from 2 to"):
            tokens(2)(wrong)


@pytest.mark.parametrize("command", ["list", "show sdpa", "explain"])
def test_json_is_printed_or_written_beside_the_tables(nsa, tmp_path, command):
    words, file = ["backends", *command.split()], tmp_path / "answer.json"
    printed, tables = nsa(*words, "--json"), nsa(*words)
    assert nsa(*words, "--json", "-") == printed
    assert nsa(*words, "--json", str(file)) == tables
    assert json.loads(file.read_text()) == json.loads(printed.out)


def test_the_time_left_follows_the_costs(monkeypatch, capsys):
    now = iter([0.0, 30.0, 30.0, 30.0, 600.0, 600.0, 600.0, 700.0, 700.0, 700.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(now))
    with output.progress(3, 400.0) as advance:
        advance("first", 300.0)
        advance("second", 50.0)
        advance("third", 50.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["1/3 first, about 10 s left", "2/3 second, about 86 s left", "3/3 third"]


def test_help_shows_choices_and_no_type_of_python(nsa):
    commands = ["", "backends", "backends list", "backends explain", "verify", "bench", "train"]
    texts = [nsa(*command.split(), "-h").out for command in commands]
    assert not re.search(r"<(int|str|float|path|list|bool)[ >\[]", "".join(texts))
    assert "prefill|decode" in texts[3]
    assert "tiny|toy|m7c_125m" in texts[-1]
