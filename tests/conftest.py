"""Shared by all tests: the `nsa` fixture, GPU skips, the marker few_cases, the final summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest

from nsa_core.util import child

UNKNOWN_CASES = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Mark slow cases before the hooks that deselect tests.

    This hook gets all items. A hook for single items would get only those of this folder.
    """
    # `pytest file.py::test[a]` and `pytest --last-failed` collect some cases only.
    named = any("::" in argument for argument in config.args)
    whole = not named and not config.getoption("lf", False)
    _mark_cases(items, whole)
    yield
    _skip_without_gpu(items)


def _mark_cases(items: list[pytest.Item], whole: bool) -> None:
    """Mark the cases of functions with few_cases as slow, but for the few of the ordinary run."""
    functions: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("few_cases") and not item.get_closest_marker("slow"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in functions.values():
        few = cases[0].get_closest_marker("few_cases").args or _covering_cases(cases)
        unknown = {*few} - {case.callspec.id for case in cases} if whole else ()
        for case in cases[1 if unknown else 0 :]:
            if case.callspec.id not in few:
                case.add_marker("slow")
        if unknown:
            cases[0].stash[UNKNOWN_CASES] = f"few_cases names {sorted(unknown)}, which do not exist"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail the test of a function whose few_cases names an absent case."""
    if UNKNOWN_CASES in item.stash:
        pytest.fail(item.stash[UNKNOWN_CASES], pytrace=False)


def _covering_cases(cases: Sequence[Any]) -> list[str]:
    """Return the ids of few cases in which every value of every parameter occurs."""
    values = {case.callspec.id: {*map(repr, case.callspec.params.items())} for case in cases}
    few, wanted = [], set().union(*values.values())
    while wanted:
        few.append(max(values, key=lambda name: len(wanted & values[name])))
        wanted -= values[few[-1]]
    return few


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
        terminalreporter.section("figures of tests/verify/report_rows/README.md")
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
