"""`nsa backends new` writes a package that installs, is listed, passes conformance and is used."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from nsa_cli import scaffold
from nsa_core.errors import InvalidInput

SHORT = "loads or generated and win and float32"
LONG = "loads or operator or generated and (win or steps)"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """(the generated package, the directory in which it is installed)."""
    home, site = tmp_path_factory.mktemp("fresh") / "package", tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "nsa_cli", "backends", "new", "fresh-one", str(home)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"next: pip install -e '{home}[test]'; python -m pytest {home}" in done.stdout
    assert '\ntest = ["nsa-verify[test]"]' in (home / "pyproject.toml").read_text()
    offline = [
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "-q",
    ]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(site), str(home)]
    subprocess.run(command, check=True, capture_output=True)
    return home, site


@pytest.mark.slow
def test_the_generated_backend_is_listed_and_ready(nsa, fresh) -> None:
    done = nsa("backends", "list", "--json", path=fresh[1])
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["backends"]}
    row = rows["fresh-one"]
    assert (row["status"], row["distribution"]) == ("ready", "nsa-backend-fresh-one")
    assert [
        slot for slot, offer in row["slots"].items() if offer["accepted"] and offer["backward"]
    ] == ["win"]


@pytest.mark.slow
@pytest.mark.parametrize("tests", [SHORT, LONG])
def test_the_generated_three_line_test_passes(tests, nsa, fresh) -> None:
    home, site = fresh
    test = home / "tests" / "test_conformance.py"
    assert len([line for line in test.read_text().splitlines() if line.strip()]) == 3
    done = nsa(
        "-q", "-p", "no:cacheprovider", "-k", tests, str(test), path=site, module="pytest", cwd=home
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "passed" in done.stdout


@pytest.mark.slow
def test_the_generated_backend_passes_verify(nsa, fresh, tmp_path) -> None:
    report = tmp_path / "report.json"
    done = nsa("verify", "--win", "fresh-one", "--json", str(report), path=fresh[1])
    assert done.returncode == 0, done.stdout[-2000:]
    document = json.loads(report.read_text())
    assert document["backends"]["win"] == "fresh-one 0.1.0"
    profiled = [
        f
        for f in document["findings"]
        if (f["check"], f["slot"]) == ("dispatch", "win") and f["quantity"] == "profile"
    ]
    assert profiled
    assert all("nsa_backend_fresh_one.win" in f["detail"] for f in profiled)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "auto",
        "sdpa",
        "Mine",
        "my win",
        "1st",
        "-x",
        "my_win",
        "mine-",
        "a--b",
        "ü",
        "../up",
        "x" * 41,
    ],
)
def test_an_invalid_or_used_name_is_refused(name: str, tmp_path) -> None:
    with pytest.raises(InvalidInput) as caught:
        scaffold.create(name, tmp_path / "new")
    assert repr(name) in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_an_empty_directory_is_accepted(tmp_path) -> None:
    written = scaffold.create("mine", tmp_path)
    assert {p.name for p in written} >= {
        "pyproject.toml",
        "README.md",
        "plugin.py",
        "probe.py",
        "win.py",
    }
    assert all(p.is_file() for p in written)
