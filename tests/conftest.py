"""Shared by all tests: the `nsa` fixture, GPU skips, shards, and sections of the final summary."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import pytest
import sharding

from nsa_core.util import child


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="run only shard I of N")


def pytest_configure(config: pytest.Config) -> None:
    try:
        sharding.parse_shard(config.getoption("--shard") or "1/1")
    except ValueError as error:
        raise pytest.UsageError(f"--shard: {error}") from None


COLLECTED = pytest.StashKey[list[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Mark slow tests before the hooks that deselect tests; sort and divide what they leave.

    This hook gets all items. A hook for single items would get only those of this folder.
    """
    config.stash[COLLECTED] = [item.nodeid for item in items]
    for item in items:
        if item.nodeid in sharding.ONLY_IN_FULL:
            item.add_marker("slow")
    _mark_cases(items)
    yield
    _skip_without_gpu(items)
    if hasattr(config, "workerinput"):  # xdist distributes files in this order: longest first
        weights = sharding.seconds_of([item.nodeid for item in items])
        seconds_of_file: Counter[str] = Counter()
        for name, seconds in weights.items():
            seconds_of_file[name.partition("::")[0]] += seconds
        items.sort(key=lambda item: -seconds_of_file[item.nodeid.partition("::")[0]])
    if text := config.getoption("--shard"):
        selected, shards = sharding.parse_shard(text)
        shard_of_item = sharding.shard_of_each([item.nodeid for item in items], shards)
        config.hook.pytest_deselected(
            items=[item for item, shard in zip(items, shard_of_item) if shard != selected]
        )
        items[:] = [item for item, shard in zip(items, shard_of_item) if shard == selected]


def _mark_cases(items: list[pytest.Item]) -> None:
    """Mark cases of the functions in few_cases.txt as slow, if others have the same values."""
    functions: dict[str, list[pytest.Function]] = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in sharding.FEW_CASES and not item.get_closest_marker("slow"):
            assert isinstance(item, pytest.Function), name
            functions.setdefault(name, []).append(item)
    for cases in functions.values():
        values = [{k: repr(value) for k, value in case.callspec.params.items()} for case in cases]
        kept = sharding.covering_cases(values)
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker("slow")


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print interpreted kernels, measured figures, and the mutation score with a line per mutant.

    Tests attach these lines to their reports as user properties, which xdist workers pass on.
    """
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    interpreted = [
        value for report in reports for key, value in report.user_properties if key == "interpreted"
    ]
    if interpreted:
        terminalreporter.section("kernels in Triton's interpreter")
        for line in sorted(interpreted):
            terminalreporter.line(line)
    figures = [
        (report.nodeid, value)
        for report in reports
        for key, value in report.user_properties
        if key == "figure"
    ]
    if figures:
        terminalreporter.section("figures of docs/explanation/report-rows.md")
        for name, text in sorted(figures):
            terminalreporter.line(f"{name.split('::')[-1]}: {text}")
    scores = [
        value
        for report in reports
        for key, value in report.user_properties
        if key == "semantic_score"
    ]
    if scores:
        terminalreporter.section("semantic mutants")
        for line in scores:
            terminalreporter.line(line)
    mutants = [
        dict(report.user_properties) | {"seconds": report.duration}
        for report in reports
        if report.user_properties
    ]
    mutants = [mutant for mutant in mutants if "mutant" in mutant]
    if not mutants:
        return
    killed = sum(bool(mutant["killed_by"]) for mutant in mutants)
    terminalreporter.section(f"mutation score: {killed} of {len(mutants)} killed")
    for mutant in sorted(mutants, key=lambda mutant: str(mutant["mutant"])):
        terminalreporter.line(
            f"{mutant['mutant']:56} {mutant['seconds']:5.1f} s  {mutant['killed_by'] or 'SURVIVED'}"
        )


@pytest.fixture(scope="session")
def collected_ids(request: pytest.FixtureRequest) -> list[str]:
    """The ids of all tests that this run collected, including deselected ones."""
    return request.config.stash[COLLECTED]


@dataclasses.dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


# Children of this process start with torch, whichever test starts the first one.
child.processes.set_forkserver_preload(["nsa_verify.run.workers"])


@pytest.fixture
def nsa(capsys: pytest.CaptureFixture[str]) -> Callable[..., CommandResult]:
    """Return a function that runs `nsa` in this process, which has imported torch."""
    from nsa_cli.app import main

    def run(*arguments: str) -> CommandResult:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        captured = capsys.readouterr()
        return CommandResult(int(caught.value.code or 0), captured.out, captured.err)

    return run
