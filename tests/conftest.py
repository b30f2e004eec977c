"""Shared by every test: `nsa` in this process, skips where there is no CUDA GPU, shards, figures
and scores at the end.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import sharding


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="run part I of N of the tests")


def pytest_configure(config: pytest.Config) -> None:
    try:
        sharding.parsed(config.getoption("--shard") or "1/1")
    except ValueError as error:
        raise pytest.UsageError(f"--shard: {error}") from None


COLLECTED = pytest.StashKey[list[str]]()


def pytest_itemcollected(item: pytest.Item) -> None:
    item.config.stash.setdefault(COLLECTED, []).append(item.nodeid)


@pytest.hookimpl(trylast=True)  # other hooks deselect first
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_without_gpu(items)
    if hasattr(config, "workerinput"):  # xdist hands out files in this order: long ones first
        weights = sharding.seconds_of([item.nodeid for item in items])
        files: Counter[str] = Counter()
        for name, seconds in weights.items():
            files[name.partition("::")[0]] += seconds
        items.sort(key=lambda item: -files[item.nodeid.partition("::")[0]])
    if text := config.getoption("--shard"):
        shard, shards = sharding.parsed(text)
        places = sharding.shard_of_each([item.nodeid for item in items], shards)
        config.hook.pytest_deselected(
            items=[item for item, place in zip(items, places) if place != shard]
        )
        items[:] = [item for item, place in zip(items, places) if place == shard]


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What ran in triton's interpreter, measured figures, a line per mutant and the score, whoever
    shared the work.
    """
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    interpreted = [
        value for r in reports for key, value in r.user_properties if key == "interpreted"
    ]
    if interpreted:
        terminalreporter.section("kernels in triton's interpreter")
        for line in sorted(interpreted):
            terminalreporter.line(line)
    figures = [
        (r.nodeid, value) for r in reports for key, value in r.user_properties if key == "figure"
    ]
    if figures:
        terminalreporter.section("figures of the reports' rows")
        for name, text in sorted(figures):
            terminalreporter.line(f"{name.split('::')[-1]}: {text}")
    mutants = [
        dict(r.user_properties) | {"seconds": r.duration} for r in reports if r.user_properties
    ]
    mutants = [m for m in mutants if "mutant" in m]
    if not mutants:
        return
    killed = sum(bool(m["killed_by"]) for m in mutants)
    terminalreporter.section(f"mutation score: {killed} of {len(mutants)} killed")
    for m in sorted(mutants, key=lambda m: str(m["mutant"])):
        terminalreporter.line(
            f"{m['mutant']:56} {m['seconds']:5.1f} s  {m['killed_by'] or 'SURVIVED'}"
        )


@pytest.fixture(scope="session")
def collected_here(request: pytest.FixtureRequest) -> list[str]:
    """The ids of all tests that this run collected, those that it leaves out too."""
    return request.config.stash[COLLECTED]


@dataclasses.dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def nsa(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run `nsa` here, where torch is loaded already."""
    from nsa_cli.app import main

    def run(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        captured = capsys.readouterr()
        return Done(int(caught.value.code or 0), captured.out, captured.err)

    return run
