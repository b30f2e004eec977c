"""`nsa conformance`: run the conformance suite on one backend without writing a test file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_cli import output
from nsa_cli.choices import silence_profiler
from nsa_cli.verify import Device, Preset
from nsa_core.util.interruption import Interruption, deferred_signals, exit_code

if TYPE_CHECKING:
    import pytest

    from nsa_core.plan.loading import BackendEntry


def conformance(
    name: Annotated[str, typer.Argument(help="Name of the backend.")],
    device: Annotated[
        Device, typer.Option(help="auto: cuda if a GPU is available, else cpu.")
    ] = Device.auto,
    preset: Annotated[
        Preset, typer.Option(help="Cases of the checks, as for nsa verify.")
    ] = Preset.quick,
    only: Annotated[
        str,
        typer.Option(
            "-k", help="Run only the tests that match this pytest expression.", show_default=False
        ),
    ] = "",
    stop: Annotated[bool, typer.Option("-x", help="Stop after the first failure.")] = False,
    verbose: Annotated[
        bool, typer.Option("-v", help="Print a line per test, and the reasons of skipped tests.")
    ] = False,
) -> None:
    """Run the conformance suite on one backend; the slots that it offers select the tests.

    Exit code 0: all tests passed; 1: a test failed; 2: unknown backend; 3: the backend cannot run
    on this machine or refuses all requests of the tests, or pytest is not installed; 4: pytest
    itself failed.
    """
    with output.exit_codes(), deferred_signals() as interruption:
        code = _run_suite(name, device.value, preset.value, only, stop, verbose, interruption)
    raise typer.Exit(code)


def _run_suite(
    name: str,
    device: str,
    preset: str,
    only: str,
    stop: bool,
    verbose: bool,
    interruption: Interruption,
) -> int:
    from nsa_core.errors import BackendUnavailable, InvalidInput
    from nsa_core.util.extras import require_module
    from nsa_verify.isolation.children import needs_isolation, preload

    entry = output.find_backends().get(name)
    if needs_isolation(entry):
        preload(["nsa_verify.conformance.suite"])
    if entry.status != "ready":
        raise BackendUnavailable(f"{entry.title} is {entry.status}: {entry.reason}")
    pytest = require_module("pytest", "nsa conformance needs", "nsa-verify[test]")
    silence_profiler()
    import torch

    from nsa_core.plan.device import usable_device

    if device != "auto":
        usable_device(device)
    # Cases are small: starting more threads takes longer than the computation.
    torch.set_num_threads(1)
    import nsa_verify.conformance

    folder = Path(nsa_verify.conformance.__file__).parent
    plugin = _PytestPlugin(name, device, preset, verbose, interruption)
    # Ignore the pytest settings, conftest files and cache of the caller.
    arguments = [
        str(folder / "collected.py"),
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        "--confcutdir",
        str(folder),
    ]
    arguments += [
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-o",
        "addopts=",
        "--no-header",
    ]
    # The suite has no assert statements of its own, so pytest need not rewrite loaded modules.
    arguments += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    # The plugin prints the names of tests, because pytest's have a path and do not fit a line.
    arguments += ["-q", "-r", "N", "--tb=short", "-o", "console_output_style=classic"]
    arguments += ["-k", only] if only else []
    with _child_of(entry, arguments, plugin.options) as plugins:
        status = int(pytest.main(arguments + ["-x"] * stop, plugins=[plugin, *plugins]))
    if status == pytest.ExitCode.INTERRUPTED:
        if not interruption.received:
            raise KeyboardInterrupt
        print(f"INTERRUPTED by {interruption.name}, {plugin.left} of {plugin.tests} tests left")
        return exit_code(interruption.name)
    if status == pytest.ExitCode.USAGE_ERROR:
        raise InvalidInput(f"-k must be a pytest expression, got {only!r}")
    if status == pytest.ExitCode.TESTS_FAILED:
        return output.FAILED
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise ImportError(f"pytest ended with status {status}")
    if not plugin.judged:
        raise BackendUnavailable(f"nothing could be tested: {plugin.reason or 'no test matches'}")
    return 0


@contextlib.contextmanager
def _child_of(
    entry: BackendEntry, arguments: Sequence[str], options: dict[str, str]
) -> Iterator[list[Any]]:
    """Yield the pytest plugins that run the tests of a third-party backend in a child process."""
    import torch

    from nsa_verify.conformance.isolated import TEST_LIMIT_S, IsolatedTests
    from nsa_verify.isolation.children import needs_isolation

    if not needs_isolation(entry):
        yield []
        return
    device = options["nsa_device"]
    uses_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    isolated = IsolatedTests(arguments, options, TEST_LIMIT_S["cuda" if uses_cuda else "cpu"])
    with isolated.running():
        yield [isolated]


class _PytestPlugin:
    """Passes the command's options to the suite, counts its tests, and ends it on a signal."""

    def __init__(
        self, name: str, device: str, preset: str, verbose: bool, interruption: Interruption
    ) -> None:
        self.options = {"nsa_backend": name, "nsa_device": device, "nsa_preset": preset}
        self.judged = 0  # tests in which a kernel ran
        self.reason = ""  # of the last skipped test
        self.tests = self.left = 0  # collected tests, and those that have not ended
        self._interruption, self._verbose = interruption, verbose
        self._failed: list[str] = []

    def pytest_configure(self, config: pytest.Config) -> None:
        """Set the options that the suite reads, which pytest's command line does not have."""
        for option, value in self.options.items():
            setattr(config.option, option, value)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the number of collected tests."""
        self._session, self.tests = session, len(session.items)
        self.left = self.tests

    def pytest_runtest_logfinish(self) -> None:
        """Count a test that has ended; stop the session after a signal."""
        self.left -= 1
        if self._interruption.received and self.left:
            self._session.shouldstop = f"interrupted by {self._interruption.name}"

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count the tests in which a kernel ran."""
        from nsa_verify.conformance.suite import TESTS_WITHOUT_KERNELS  # imports torch

        if report.skipped and isinstance(report.longrepr, tuple):
            self.reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        self._print_test(report)
        with contextlib.suppress(ValueError):
            test = report.location[2].split(".")[-1]
            runs_kernel = not test.startswith(TESTS_WITHOUT_KERNELS)
            self.judged += report.when == "call" and not report.skipped and runs_kernel

    def _print_test(self, report: Any) -> None:
        """Print the line of a test that has ended, and remember the name of a failed one."""
        name = report.nodeid.partition("::")[2].partition("::")[2]
        if report.failed:
            self._failed.append(name)
        if self._verbose and (report.when == "call" or not report.passed):
            reason = f": {self.reason}" if report.skipped else ""
            output.print_text(output.console(), f"{report.outcome:7} {name}{reason}")

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Print no letter per test with -v, which prints a line per test."""
        if not self._verbose or (report.when != "call" and report.passed):
            return None
        return report.outcome, "", ""

    def pytest_terminal_summary(self) -> None:
        """Print the names of the failed tests behind their reports."""
        for name in self._failed:
            output.print_text(output.console(), f"FAILED {name}", "red")
