"""`nsa conformance`: the suite for authors of backends, without writing a test file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_cli import output
from nsa_cli.choices import quiet_profiler
from nsa_cli.verify import Device, Preset
from nsa_core.util.interruption import Interruption, exit_code, held

if TYPE_CHECKING:
    import pytest


def conformance(
    name: Annotated[str, typer.Argument(help="A backend's name.")],
    device: Annotated[Device, typer.Option(help="auto: cuda where there is one.")] = Device.auto,
    preset: Annotated[Preset, typer.Option(help="Cases of the verify checks.")] = Preset.quick,
    only: Annotated[
        str,
        typer.Option(
            "-k", help="Run only tests that match this pytest expression.", show_default=False
        ),
    ] = "",
    stop: Annotated[bool, typer.Option("-x", help="Stop at the first failure.")] = False,
    verbose: Annotated[
        bool, typer.Option("-v", help="A line per test, and why a test was skipped.")
    ] = False,
) -> None:
    """Run the conformance suite of nsa_verify.conformance on one backend: what it declares decides
    what runs.

    Exit code 0: all passed; 1: a test failed; 2: unknown backend; 3: it cannot run here or takes
    nothing that is asked, or pytest is not installed; 4: pytest itself failed.
    """
    with output.exit_codes(), held() as interruption:
        code = _run(name, device.value, preset.value, only, stop, verbose, interruption)
    raise typer.Exit(code)


def _run(
    name: str,
    device: str,
    preset: str,
    only: str,
    stop: bool,
    verbose: bool,
    interruption: Interruption,
) -> int:
    from nsa_core.errors import BackendUnavailable, InvalidInput
    from nsa_core.util.extras import needed

    entry = output.find_backends().get(name)
    if entry.status != "ready":
        raise BackendUnavailable(f"{entry.title} is {entry.status}: {entry.reason}")
    pytest = needed("pytest", "nsa conformance needs", "nsa-verify[test]")
    quiet_profiler()
    import torch

    from nsa_core.dispatch.device import known_device

    if device != "auto":
        known_device(device)
    # the cases are small: handing them to more threads takes longer than computing them
    torch.set_num_threads(1)
    import nsa_verify.conformance

    home = Path(nsa_verify.conformance.__file__).parent
    run = _Run(name, device, preset, interruption)
    # Nothing of the caller's own pytest settings, conftest files or cache.
    arguments = [
        str(home / "collected.py"),
        "-c",
        os.devnull,
        "--rootdir",
        str(home),
        "--confcutdir",
        str(home),
    ]
    arguments += [
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-o",
        "addopts=",
        "--no-header",
    ]
    # The suite asserts nothing by itself: pytest need not rewrite what is loaded already.
    arguments += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    arguments += ["-rs", "-v"] if verbose else ["-q"]
    arguments += (["-k", only] if only else []) + (["-x"] if stop else [])
    status = int(pytest.main(arguments, plugins=[run]))
    if status == pytest.ExitCode.INTERRUPTED:
        if not interruption.came:
            raise KeyboardInterrupt
        print(f"INTERRUPTED by {interruption.name}, {run.left} of {run.tests} tests left")
        return exit_code(interruption.name)
    if status == pytest.ExitCode.USAGE_ERROR:
        raise InvalidInput(f"pytest refuses -k {only!r}")
    if status == pytest.ExitCode.TESTS_FAILED:
        return output.FAILED
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise ImportError(f"pytest ended with status {status}")
    if not run.judged:
        raise BackendUnavailable(f"nothing could be tested: {run.reason or 'no test matches'}")
    return 0


class _Run:
    """What the command tells pytest, and what it wants to know afterwards."""

    def __init__(self, name: str, device: str, preset: str, interruption: Interruption) -> None:
        self.options = {"nsa_backend": name, "nsa_device": device, "nsa_preset": preset}
        # tests that passed or failed, the one that only loads the backend and asks its probe left
        # out
        self.judged = 0
        self.reason = ""
        self.tests = self.left = 0  # how many there are, and how many of them did not end
        self._interruption = interruption

    def pytest_configure(self, config: pytest.Config) -> None:
        """Set what the suite reads; a backend is no option of pytest's command line."""
        for option, value in self.options.items():
            setattr(config.option, option, value)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note how many tests there are."""
        self._session, self.tests = session, len(session.items)
        self.left = self.tests

    def pytest_runtest_logfinish(self) -> None:
        """Count a test that has ended, and end the run behind it where a signal asks for it."""
        self.left -= 1
        if self._interruption.came and self.left:
            self._session.shouldstop = f"interrupted by {self._interruption.name}"

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count the tests in which a kernel was judged."""
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        with contextlib.suppress(ValueError):
            test = report.location[2].split(".")[-1]
            ran_a_kernel = not test.startswith(("test_is_installed", "test_probe_answers"))
            self.judged += report.when == "call" and not report.skipped and ran_a_kernel
