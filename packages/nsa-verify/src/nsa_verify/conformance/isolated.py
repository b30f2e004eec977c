"""Run the tests of a third-party backend in a child process.

The child is replaced if it dies, or if a kernel has made the GPU unusable in it. The parent
collects the tests and prints their reports; the child runs them one at a time.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nsa_core.errors import BackendUnavailable
from nsa_core.plan.trial import describe_exit
from nsa_verify.isolation import children, gpu_context
from nsa_verify.isolation.activity import record_activity
from nsa_verify.isolation.call_guard import guarded_calls
from nsa_verify.isolation.captured_output import capture_output, forget_output

TEST_LIMIT_S = {"cpu": 120.0, "cuda": 600.0}
COLLECT_LIMIT_S = 120.0
MAX_TIMEOUTS = 5  # after so many tests beyond their limit, the others are not run
_READY = "ready"


class _End(NamedTuple):
    """The last message about a test, with the error that made the GPU unusable, or ""."""

    gpu_error: str


class _Ended(Exception):
    """The child ended, or was ended; the message is the reason."""


class IsolatedTests:
    """A pytest plugin that runs each test in a child process.

    Args:
        arguments: Arguments of pytest that collect the same tests.
        options: Options that the suite reads, by name.
        limit_s: Seconds after which a test counts as hanging.
    """

    def __init__(
        self, arguments: Sequence[str], options: Mapping[str, Any], limit_s: float
    ) -> None:
        self._arguments, self._options, self._limit_s = list(arguments), dict(options), limit_s
        self._timeouts = 0
        self._process: Any = None
        self._connection: Any = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Collect the tests in a child, and end the child after the block.

        Raises:
            BackendUnavailable: The child ended; the backend's probe ran in it.
        """
        with tempfile.TemporaryDirectory(prefix="nsa-", ignore_cleanup_errors=True) as folder:
            self._folder = Path(folder)
            try:
                self._start()
            except _Ended as error:
                raise BackendUnavailable(str(error)) from None
            try:
                yield
            finally:
                self._end()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """Run a test in the child, and report it as pytest does."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _reports(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        started = time.monotonic()
        try:
            if self._timeouts >= MAX_TIMEOUTS:
                raise _Ended(
                    f"not run: {MAX_TIMEOUTS} tests did not end within {self._limit_s:g} s"
                )
            if self._process is None:
                self._start()
            with contextlib.suppress(OSError):  # the next receive detects a dead child
                self._connection.send(item.nodeid)
            while not isinstance(message := self._receive(self._limit_s, "in this test"), _End):
                yield item.config.hook.pytest_report_from_serializable(
                    config=item.config, data=message
                )
            if message.gpu_error:
                self._end()
                raise _Ended(f"a kernel made the GPU unusable: {message.gpu_error}")
        except _Ended as error:
            yield pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords={},
                outcome="failed",
                longrepr=str(error),
                when="call",
                duration=time.monotonic() - started,
            )

    def _start(self) -> None:
        self._connection, child_end = children.processes.Pipe()
        self._process = children.start(
            _serve, child_end, self._folder, self._arguments, self._options
        )
        child_end.close()
        self._receive(COLLECT_LIMIT_S, "while its tests were collected")

    def _receive(self, limit_s: float, doing: str) -> Any:
        """Return the next message of the child; end the child at the limit.

        Raises:
            _Ended: The child ended, or was ended.
        """
        end = time.monotonic() + limit_s
        try:
            while not self._connection.poll(0.02):
                if time.monotonic() > end:
                    self._timeouts += 1
                    raise _Ended(self._end(f"did not end within {limit_s:g} s {doing}"))
                if self._process.exitcode is not None and not self._connection.poll():
                    raise EOFError
            return self._connection.recv()
        except (EOFError, OSError):
            status = children.end_status(self._process)
            raise _Ended(self._end(describe_exit(status, doing))) from None

    def _end(self, why: str = "") -> str:
        """End the child; return ``why`` with what it ran and its last line of output."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None
        return children.describe_end(why, self._folder, "a third-party backend ")


class _Server:
    """The pytest plugin of the child."""

    def __init__(self, connection: Connection, options: Mapping[str, Any]) -> None:
        self._connection, self._options = connection, options

    def pytest_configure(self, config: pytest.Config) -> None:
        """Set the options that the suite reads."""
        self._config = config
        for name, value in self._options.items():
            setattr(config.option, name, value)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests that the parent names, until the pipe closes."""
        items = {item.nodeid: item for item in session.items}
        self._connection.send(_READY)
        with contextlib.suppress(EOFError, OSError):
            while True:
                item = items[self._connection.recv()]
                forget_output()
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                self._connection.send(_End(gpu_context.gpu_error()))
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send the report of a phase of a test."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(data)


def _serve(
    connection: Connection, folder: Path, arguments: Sequence[str], options: Mapping[str, Any]
) -> None:
    import torch

    capture_output(folder)
    record_activity(folder)
    torch.set_num_threads(1)
    # Without pytest's capture, the guard of the calls sees what a kernel prints.
    with guarded_calls():  # of the probes that run while tests are collected
        pytest.main([*arguments, "-s"], plugins=[_Server(connection, options)])
