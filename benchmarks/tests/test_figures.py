"""benchmarks/figures.py: pages match the result files; pieces run, resume and are refused."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import figures
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "benchmarks/README.md",
    "docs/how-to/benchmark.md",
    "docs/how-to/block-attention.md",
    "docs/how-to/train.md",
    "docs/explanation/decode.md",
    "docs/explanation/performance.md",
)
# Pages and scripts that may cite a result file of no piece, as "h100/name.json".
CITING = ("*.md", "docs/**/*.md", "packages/*/*.md", "benchmarks/**/*.md")
CITING += ("packages/*/src/**/*.py", "benchmarks/**/*.py")


@pytest.fixture
def pages(tmp_path):
    """A folder with copies of the pages and result files."""
    for page in (*PAGES, "tests/verify/report_rows/README.md"):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    for results in ("benchmarks/results", "benchmarks/study/results"):
        shutil.copytree(ROOT / results, tmp_path / results)
    return tmp_path


def git(root, *words):
    author = ("-c", "user.name=n", "-c", "user.email=n@example.com")
    subprocess.run(["git", *author, *words], cwd=root, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    """A clean checkout with a package and a benchmark that records its runs."""
    package = tmp_path / "packages" / "p" / "src" / "nsa_toy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    script = tmp_path / "benchmarks" / "toy.py"
    script.parent.mkdir()
    script.write_text(
        "import json, pathlib, sys, time\n"
        "file, mode = sys.argv[1:3]\n"
        "with open('runs.txt', 'a') as runs: runs.write(mode + ' ')\n"
        "if mode == 'slow': time.sleep(30)\n"
        "if mode == 'made': pathlib.Path('made.bin').write_text('')\n"
        "stopped = mode == 'stopped' or None\n"
        "pathlib.Path(file).write_text(json.dumps({'kind': 'toy', 'interrupted': stopped}))\n"
        "sys.exit(mode == 'broken')\n"
    )
    (tmp_path / ".gitignore").write_text("build/\nruns.txt\nmade.bin\n__pycache__/\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "First")
    return tmp_path


@pytest.fixture
def run(checkout, monkeypatch, capsys):
    """Return a function that runs pieces "name:mode:minutes" of the toy benchmark.

    It returns (exit code, output, modes of the runs).
    """
    monkeypatch.syspath_prepend(checkout / "packages" / "p" / "src")

    def piece(text, needs="", makes=()):
        name, mode, minutes = (*text.split(":"), "1")[:3]
        command = f"python benchmarks/toy.py {{file}} {mode}"
        return figures.Piece(
            name, name, command, f"{name}.json", float(minutes), needs, tuple(makes)
        )

    def run_pieces(*pieces, words=("run",)):
        (checkout / "runs.txt").write_text("")
        pieces = [each if isinstance(each, figures.Piece) else piece(each) for each in pieces]
        code = figures.main(words, checkout, pieces)
        captured = capsys.readouterr()
        runs = (checkout / "runs.txt").read_text().split()
        return code, captured.out + captured.err, runs

    run_pieces.piece = piece
    return run_pieces


def stamp_of(checkout, name):
    file = checkout / "build" / "figures" / "h200" / f"{name}.json"
    return json.loads(file.read_text())["figures"]


def test_the_pages_match_the_result_files(capsys):
    assert figures.main(["render", "--check"]) == 0, capsys.readouterr().out


def test_every_table_is_on_a_page():
    paths = [path for pattern in figures.PAGES for path in ROOT.glob(pattern)]
    shown = {m[1] for p in paths for m in figures.MARKED.findall(p.read_text(encoding="utf-8"))}
    assert shown == set(figures.TABLES)


def test_every_opening_marker_has_a_closing_marker():
    for pattern in figures.PAGES:
        for path in ROOT.glob(pattern):
            text = path.read_text(encoding="utf-8")
            complete = len(figures.MARKED.findall(text))
            assert text.count("<!-- figures:") == text.count("<!-- /figures -->") == complete, path


def test_no_value_inside_a_sentence_begins_a_line():
    """Markdown starts an HTML block there, which ends the paragraph or the list."""
    for path in (path for pattern in figures.PAGES for path in ROOT.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"(?m)^ *<!-- figures:[\w-]+ -->[^\n]", text), path


# a row of the page's table; other rows of its file are on no page
ROW = r'"subject": "auto", "shape": "64/4/128"[^\n]*"both", "batch": 1, "length": 16384, [^\n{]*'


@pytest.mark.few_cases("0")
@pytest.mark.parametrize(
    ("file", "pattern", "page"),
    [
        ("core_12_2_64.json", r'"median_ms": 10\.8978', "README.md"),
        ("train.json", r'"tokens_per_s": 163702', "benchmarks/README.md: train differ"),
        ("core_64_4_192_128.json", r'"peak_memory_bytes": 565442048', "README.md: use"),
        ("train.json", r'"tokens_per_s": 342154', "tests/verify/report_rows/README.md"),
        ("decode_small.json", r'"median_ms": 0\.02304\b', "tests/verify/report_rows/README.md"),
        ("decode.json", r'"median_ms": 0\.171952', "docs/explanation/decode.md"),
        ("train_memory.json", r'"peak_gib": 30\.272', "docs/how-to/train.md"),
        ("backends_64_4_128.json", ROW + r' \{"median_ms": [\d.]+', "benchmarks/README.md"),
    ],
    ids=map(str, range(8)),
)
def test_a_changed_number_in_a_result_file_is_detected(pages, file, pattern, page, capsys):
    results = pages / "benchmarks" / "results"
    path = next(p for gpu in ("h200", "h100") if (p := results / gpu / file).exists())
    text = path.read_text(encoding="utf-8")
    matches = re.findall(pattern, text)
    if not matches:  # after a new measurement, take any number of the same field
        field = pattern.split(":")[0]
        matches = re.findall(field + r": [\d.]+", text)[:1]
    assert matches
    key, value = matches[0].rsplit(": ", 1)
    path.write_text(text.replace(matches[0], f"{key}: {2 * json.loads(value)}"), encoding="utf-8")
    assert figures.main(["render", "--check"], pages) == 1
    assert page in capsys.readouterr().out


@pytest.mark.slow
def test_a_changed_number_on_a_page_is_detected_and_restored(pages, capsys):
    page = pages / "README.md"
    text = page.read_text(encoding="utf-8")
    body = next(match[3] for match in figures.MARKED.finditer(text) if match[2] == "use")
    page.write_text(text.replace(body, body.replace("64k", "65k"), 1), encoding="utf-8")
    assert figures.main(["render", "--check"], pages) == 1
    assert "README.md: use differ" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8") != text
    assert figures.main(["render"], pages) == 0
    assert page.read_text(encoding="utf-8") == text


def test_an_unknown_table_is_refused(pages, capsys):
    (pages / "docs" / "bench.md").write_text("<!-- figures:frob --><!-- /figures -->")
    assert figures.main(["render"], pages) == 2
    assert "figures:frob is no table" in capsys.readouterr().err


def test_every_result_file_is_that_of_a_piece():
    """Except files that a page or script cites."""
    results = ROOT / "benchmarks" / "results"
    of_pieces = {piece.nearest(results / figures.PUBLISHED) for piece in figures.PIECES}
    texts = [p.read_text(encoding="utf-8") for pattern in CITING for p in ROOT.glob(pattern)]
    others = {*results.glob("*/*")} - of_pieces
    assert others
    for path in others:
        name = f"{path.parent.name}/{path.name}"
        assert any(name in text for text in texts), f"no page or script needs {name}"


def test_times_on_the_kernels_page_are_those_of_its_sweeps():
    """Each decimal between two citations of a paragraph is a time in the file cited after it."""
    text = (ROOT / "packages/nsa-backend-triton/KERNELS.md").read_text(encoding="utf-8")
    checked = 0
    for paragraph in text.split("\n\n"):
        *parts, _ = re.split(r"`(benchmarks/results/\S+\.json)`", paragraph)
        for words, file in zip(parts[::2], parts[1::2]):
            sweeps = json.loads((ROOT / file).read_text()).get("sweeps", [])
            times = [ms for sweep in sweeps for ms in sweep["ms"].values()]
            if not times:  # a file of another kind
                continue
            for number in re.findall(r"\b\d+\.\d+\b", words):
                half = 0.501 * 10 ** -len(number.partition(".")[2])
                assert any(abs(ms - float(number)) <= half for ms in times), (file, number)
                checked += 1
    assert checked >= 8


def test_pieces_are_distinct_and_take_at_most_ten_minutes():
    pieces = figures.PIECES
    assert len({piece.name for piece in pieces}) == len({p.file for p in pieces}) == len(pieces)
    assert all(0 < piece.minutes <= 10 for piece in pieces)
    assert all("{file}" in piece.command for piece in pieces)
    assert {p.needs for p in pieces if p.needs} <= {p.name for p in pieces if p.makes}


def test_a_piece_rehearses_the_architecture_that_its_command_names():
    assert [piece for piece in figures.PIECES if piece.rehearses]
    for piece in figures.PIECES:
        architectures = re.findall(r"rehearse\.py --arch (\d+) -- ", piece.command)
        assert architectures == [piece.rehearses.removeprefix("sm")] * bool(piece.rehearses)


def test_list_shows_every_piece_with_its_state(pages, capsys):
    assert figures.main(["list"], pages) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(figures.PIECES)
    assert all(re.search("done|other source|missing", line) for line in lines[1:])


def test_a_reader_that_closes_the_output_gets_no_traceback():
    script = [sys.executable, str(ROOT / "benchmarks" / "figures.py"), "list"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(script, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_run_measures_stamps_and_skips_finished_pieces(run, checkout):
    code, _, runs = run("a:quick", "b:quick")
    assert (code, runs) == (0, ["quick", "quick"])
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True
    ).stdout.strip()
    stamp = stamp_of(checkout, "a")
    assert (stamp["commit"], stamp["clean"], stamp["piece"]) == (head, True, "a")
    assert set(stamp["trees"]) == {"nsa_toy"}
    assert set(stamp["scripts"]) == {"toy.py"}
    code, output, runs = run("a:quick", "b:quick")
    assert (code, runs) == (0, [])
    assert "a: done before" in output


@pytest.mark.parametrize("change", ["package", "script", "command"])
def test_a_changed_source_or_command_runs_the_piece_again(run, checkout, change):
    assert run("a:quick")[0] == 0
    path = {"package": "packages/p/src/nsa_toy/__init__.py", "script": "benchmarks/toy.py"}
    if change in path:
        with (checkout / path[change]).open("a") as file:
            file.write("# changed\n")
        git(checkout, "commit", "-qam", "Change")
    code, _, runs = run("a:other" if change == "command" else "a:quick")
    assert (code, len(runs)) == (0, 1)


def test_a_commit_to_unrelated_files_keeps_the_results(run, checkout):
    assert run("a:quick")[0] == 0
    (checkout / "README.md").write_text("text")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "Page")
    assert run("a:quick")[2] == []


@pytest.mark.parametrize("mode", ["stopped", "broken"])
def test_an_interrupted_or_failed_piece_runs_again(run, checkout, mode):
    piece = run.piece(f"a:{mode}")
    code, output, runs = run(piece, "b:quick")
    assert (code, runs) == (1, [mode, "quick"])
    assert "1 of 2 pieces are left: a" in output
    assert not list((checkout / "build" / "figures" / "h200").glob("*a.json"))
    assert run(piece, "b:quick")[2] == [mode]


@pytest.mark.slow
def test_a_piece_beyond_the_time_limit_is_ended(run, checkout):
    code, output, runs = run("a:slow:0.01", words=("run", "--minutes", "0.02"))
    assert (code, runs) == (1, ["slow"])
    assert "the time is over" in output
    assert run("a:slow:0.01", words=("run", "--minutes", "0.02"))[2] == ["slow"]


def test_ctrl_c_ends_the_piece_and_leaves_no_result(checkout, run, monkeypatch):
    def interrupted(self, timeout=None):
        monkeypatch.undo()
        self.send_signal(signal.SIGTERM)
        raise KeyboardInterrupt

    piece = run.piece("a:slow")
    monkeypatch.syspath_prepend(checkout / "packages" / "p" / "src")
    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    runner = figures.Figures("h200", checkout, [piece], allow_dirty=True)
    with pytest.raises(KeyboardInterrupt):
        runner.run_piece(piece, 5)
    assert not list((checkout / "build" / "figures" / "h200").iterdir())


def test_a_piece_longer_than_the_time_left_is_not_started(run):
    code, output, runs = run("a:quick:1", "b:quick:9", words=("run", "--minutes", "5"))
    assert (code, runs) == (1, ["quick"])
    assert "b: not started, it takes about 9 minutes and 5.0 of 5 are left" in output


def test_only_runs_the_named_pieces_and_their_requirements(run, checkout):
    maker = run.piece("maker:made", makes=["made.bin"])
    user = run.piece("user:quick", needs="maker")
    code, _, runs = run(maker, "other:quick", user, words=("run", "--only", "user"))
    assert (code, runs) == (0, ["made", "quick"])
    (checkout / "made.bin").unlink()  # as on a new machine, which has only the result files
    (checkout / "build" / "figures" / "h200" / "user.json").unlink()
    assert run(maker, user, words=("run", "--only", "user"))[2] == ["made", "quick"]
    code, output, _ = run(maker, user, words=("run", "--only", "frob"))
    assert (code, "no piece is named frob" in output) == (2, True)


def test_a_piece_that_does_not_write_its_files_fails(run):
    maker = run.piece("maker:quick", makes=["made.bin"])
    code, output, runs = run(maker, run.piece("user:quick", needs="maker"))
    assert (code, runs) == (1, ["quick"])
    assert "it did not write made.bin" in output


@pytest.mark.parametrize("change", ["tracked", "new"])
def test_a_dirty_checkout_is_refused_and_recorded(run, checkout, change):
    name = "toy.py" if change == "tracked" else "more.py"
    with (checkout / "benchmarks" / name).open("a") as file:
        file.write("# not committed\n")
    code, output, runs = run("a:quick")
    assert (code, runs) == (2, [])
    assert "commit the changes first" in output
    assert run("a:quick", words=("run", "--allow-dirty"))[0] == 0
    assert stamp_of(checkout, "a")["clean"] is False
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "Clean")
    assert run("a:quick")[2] == ["quick"]  # a result of a dirty checkout does not count


def test_results_do_not_make_the_checkout_dirty(run, checkout):
    folder = checkout / "benchmarks" / "results" / "h200"
    folder.mkdir(parents=True)
    (folder / "z.json").write_text("{}")
    assert run("a:quick")[0] == 0
    assert stamp_of(checkout, "a")["clean"] is True


def test_installed_packages_that_differ_from_the_checkout_are_refused(
    run, checkout, tmp_path_factory, monkeypatch
):
    other = tmp_path_factory.mktemp("site") / "nsa_toy"
    other.mkdir()
    (other / "__init__.py").write_text("# another version\n")
    monkeypatch.syspath_prepend(other.parent)
    code, output, runs = run("a:quick")
    assert (code, runs) == (2, [])
    assert "the installed nsa_toy is not that of the checkout" in output


def test_collect_copies_clean_results(run, checkout):
    assert run("a:quick")[0] == 0
    assert run("a:quick", words=("collect",))[0] == 0
    collected = json.loads((checkout / "benchmarks" / "results" / "h200" / "a.json").read_text())
    assert collected["kind"] == "toy"
    assert collected["figures"]["clean"] is True
    shutil.rmtree(checkout / "build")
    assert run("a:quick")[2] == []  # the repository's own result counts


def test_a_gpu_whose_flash_attention_4_does_not_load_is_refused(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, code in (((9, 0), 2), ((8, 0), 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        actual, output, runs = run("a:quick")
        assert (actual, runs) == (code, [] if code else ["quick"])
        assert ("the package flash-attn-4 is not installed" in output) == bool(code)


def test_collect_refuses_results_from_a_dirty_checkout(run, checkout):
    (checkout / "benchmarks" / "more.py").write_text("")
    assert run("a:quick", words=("run", "--allow-dirty"))[0] == 0
    code, output, _ = run("a:quick", words=("collect",))
    assert (code, "measured on a dirty checkout" in output) == (2, True)
    assert run("a:quick", words=("collect", "--allow-dirty"))[0] == 0


def test_a_stamped_result_of_nsa_bench_stays_readable(tmp_path):
    from nsa_bench.result import read_result

    source = ROOT / "benchmarks" / "results" / "h200_as_sm80" / "a100_core_64_4_128.json"
    document = json.loads(source.read_text(encoding="utf-8"))
    del document["figures"]  # its stamp
    file = tmp_path / "unstamped.json"
    file.write_text(text := json.dumps(document), encoding="utf-8")
    copy = tmp_path / "r.json"
    copy.write_text(figures.stamped(text, {"piece": "a"}), encoding="utf-8")
    assert read_result(copy) == read_result(file)
    assert figures.read_stamp(copy) == {"piece": "a"}


@pytest.mark.parametrize(("rehearses", "ending"), [("", ""), ("sm80", "_as_sm80")])
def test_the_result_of_another_gpu_stands_in_for_a_missing_one(run, tmp_path, rehearses, ending):
    def nearest_after_writing(name):
        file = tmp_path / "results" / name / "a.json"
        file.parent.mkdir(parents=True)
        file.write_text("{}")
        nearest = piece.nearest(tmp_path / "results" / "h100")
        return nearest and nearest.parent.name

    piece = dataclasses.replace(run.piece("a:quick"), rehearses=rehearses)
    other_kind = "h100" if rehearses else "h100_as_sm80"
    assert nearest_after_writing(other_kind) is None
    assert nearest_after_writing(f"a40{ending}") == f"a40{ending}"
    assert nearest_after_writing(f"h100{ending}") == f"h100{ending}"


def test_a_rehearsed_piece_has_a_folder_of_its_own(run, checkout):
    piece = dataclasses.replace(run.piece("a:quick"), rehearses="sm80")
    assert run(piece)[0] == 0
    fresh = checkout / "build" / "figures" / "h200_as_sm80" / "a.json"
    assert json.loads(fresh.read_text())["figures"]["clean"] is True
    assert "a: done before" in run(piece)[1]
    assert run(piece, words=("collect",))[0] == 0
    collected = checkout / "benchmarks" / "results" / "h200_as_sm80" / "a.json"
    assert collected.read_text() == fresh.read_text()
