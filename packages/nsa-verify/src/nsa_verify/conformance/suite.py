"""The conformance suite: every test that a backend of Native Sparse Attention must pass, on what it
says it can do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from nsa_core.contract import SLOTS
from nsa_core.dispatch.loading import BackendEntry
from nsa_core.dispatch.probing import ask
from nsa_core.dispatch.registry import Registry, default_registry
from nsa_core.dtypes import dtype_name
from nsa_core.errors import InvalidInput
from nsa_verify.combination import Combination
from nsa_verify.conformance import kernel_checks
from nsa_verify.conformance.grid import Point, StepPoint, grid, step_grid
from nsa_verify.conformance.slot_under_test import SlotUnderTest
from nsa_verify.run import suite
from nsa_verify.run.contexts import context_of

GRID, STEPS = grid(), step_grid()
# Devices that need not be here: a probe sees metadata only, so it must have an answer to each.
DESCRIBED: tuple[tuple[str, tuple[int, int] | None], ...] = (
    ("cpu", None),
    ("cuda", (7, 5)),
    ("cuda", (8, 0)),
    ("cuda", (9, 0)),
    ("cuda", (12, 0)),
    ("meta", None),
    ("xpu", None),
)
_CODE = re.compile(r"[a-z][a-z0-9_]*")
_PROBE_FAULTS = ("probe_raised", "probe_nonsense", "probe_too_slow")
_EXTRA = (
    "operator",
    "compiled",
    "cuda_graph",
    "strided",
    "expanded",
    "long_offsets",
    "two_threads",
    "grad_modes",
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class BackendConformance:
    """Derive a class named Test... from this one and set ``backend``; pytest does the rest.

    What the backend's probe refuses is skipped with its reasons, so a backend is held to what it
    declares and no more.

    Attributes:
        backend: the backend's name.
        registry: where to look it up; None: the installed plugins.
    """

    backend: ClassVar[str] = ""
    registry: ClassVar[Registry | None] = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give every test its slots, points of the grid and verify jobs."""
        name = self.backend or getattr(metafunc.config.option, "nsa_backend", "")
        if not name:
            raise pytest.UsageError(f"{metafunc.cls}: set backend = 'the name of your backend'")
        entry = _find(name, self.registry)
        offered = [slot for slot in SLOTS if entry and entry.spec and slot in entry.spec.slots]
        if "job" in metafunc.fixturenames:
            option = metafunc.config.option
            dtypes = _taken(entry, offered, _device(option))
            todo = suite.jobs(getattr(option, "nsa_preset", "quick"), dtypes, text=None)
            labels = [f"{job.name}-{job.case.name}-{dtype_name(job.dtype)}" for job in todo]
            metafunc.parametrize("job", todo, ids=labels)
        if "slot" in metafunc.fixturenames:
            metafunc.parametrize("slot", offered or ["no slot"])
        if "form" in metafunc.fixturenames:
            forms = [s for s in offered if entry and entry.spec and entry.spec.slots[s].decode]
            metafunc.parametrize("form", forms or ["no decode form"])
        if "step" in metafunc.fixturenames:
            metafunc.parametrize("step", STEPS, ids=[step.label for step in STEPS])
        if "point" in metafunc.fixturenames:
            metafunc.parametrize("point", GRID, ids=[point.label for point in GRID])
        if "check" in metafunc.fixturenames:
            metafunc.parametrize("check", _EXTRA)

    @pytest.fixture(autouse=True)
    def _settle(self, pytestconfig: pytest.Config) -> Iterator[None]:
        self._name = self.backend or getattr(pytestconfig.option, "nsa_backend", "")
        self._device = _device(pytestconfig.option)
        entry = _find(self._name, self.registry)
        with (entry and context_of(entry, self._device)) or contextlib.nullcontext():
            yield

    def test_is_installed_and_loads(self) -> None:
        """The backend is known and ready; one that is unavailable here is skipped with its
        reason.
        """
        self._entry()

    def test_probe_answers_about_every_device(self, slot: str) -> None:
        """The probe has an answer to every request, on devices that need not be here, and the same
        one twice.
        """
        entry = self._entry()
        for point in GRID:
            for device, capability in DESCRIBED:
                for needs_grad in (False, True):
                    request = point.request(slot, device, capability, needs_grad)
                    first, again = ask(entry, request), ask(entry, request)
                    where = f"{point.label} on {device} {capability or ''}"
                    _complain(where, _reason_faults(first.reasons))
                    if first != again:
                        pytest.fail(f"{where}: asked twice, the probe answers differently")

    def test_probe_answers_about_decode_on_every_device(self, slot: str) -> None:
        """The probe has an answer to every step of decode as well, whether or not there is a decode
        form.
        """
        entry = self._entry()
        for step in STEPS:
            for device, capability in DESCRIBED:
                request = step.request(slot, device, capability)
                first, again = ask(entry, request), ask(entry, request)
                where = f"{step.label} on {device} {capability or ''}"
                _complain(where, _reason_faults(first.reasons))
                if first != again:
                    pytest.fail(f"{where}: asked twice, the probe answers differently")

    def test_probe_tells_the_truth_of_decode(self, form: str, step: StepPoint) -> None:
        """Where the probe says yes to a step the decode form runs and is right; where it says no
        there is a reason.
        """
        if form == "no decode form":
            pytest.skip("the backend declares no decode form")
        under = SlotUnderTest(self._entry(), form, self._device)
        answer = under.ask_step(step)
        _complain(step.label, _reason_faults(answer.reasons))
        if not answer.accepted:
            pytest.skip(str(answer))
        _complain(f"{form}, {step.label}", under.step_faults(step))

    def test_probe_tells_the_truth(self, slot: str, point: Point) -> None:
        """Where the probe says yes the kernel runs and is right; where it says no there is a
        reason.
        """
        under = SlotUnderTest(self._entry(), slot, self._device)
        grad = _grad(under, point)
        _complain(f"{slot}, {point.label}", list(kernel_checks.right(under, point, grad)))

    def test_kernel(self, slot: str, check: str) -> None:
        """opcheck, torch.compile, CUDA graphs, layouts, 64-bit offsets, threads, grad modes."""
        under = SlotUnderTest(self._entry(), slot, self._device)
        if check in ("cuda_graph", "long_offsets") and torch.device(self._device).type != "cuda":
            pytest.skip("needs a CUDA GPU")
        point = _first_taken(under)
        grad = _grad(under, point)
        run: kernel_checks.Check = getattr(kernel_checks, check)
        _complain(f"{slot}, {check}, {point.dtype}", list(run(under, point, grad)))

    def test_verify(self, job: suite.Job) -> None:
        """The checks of `nsa verify`, with this backend in every slot it offers."""
        entry = self._entry()
        assert entry.spec is not None  # _entry skips or fails otherwise
        offered = entry.spec.slots
        findings = job.run(
            Combination(dict.fromkeys(offered, entry.name), self._device, self.registry)
        )
        # Slots that others fill are theirs to answer for; a finding of no slot is of the whole.
        mine = [f for f in findings if f.slot in offered or f.slot not in SLOTS]
        wrong = [f"{f.slot} {f.quantity}: {f.detail}" for f in mine if f.ok is False]
        _complain(f"{job.name}, {job.case.name}", wrong)
        if not any(f.ok for f in mine):
            said = {f.detail for f in mine if f.detail} or {"does not apply to this case"}
            pytest.skip("; ".join(sorted(said)))

    def _entry(self) -> BackendEntry:
        registry = default_registry() if self.registry is None else self.registry
        try:
            entry = registry.get(self._name)
        except InvalidInput as error:
            pytest.fail(f"{error}; is its distribution installed?", pytrace=False)
        if entry.status == "ready":
            return entry
        text = f"{entry.title} is {entry.status}: {entry.reason}"
        if entry.status in ("unavailable", "disabled"):
            pytest.skip(text)
        pytest.fail(text, pytrace=False)


def _find(name: str, registry: Registry | None) -> BackendEntry | None:
    try:
        return (default_registry() if registry is None else registry).get(name)
    except InvalidInput:
        return None  # test_is_installed_and_loads says so


def _device(option: Any) -> str:
    asked: str = getattr(option, "nsa_device", "auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked


def _taken(entry: BackendEntry | None, offered: list[str], device: str) -> list[torch.dtype]:
    """Two dtypes for the verify jobs, of those that the base request is taken in; the grid covers
    all four.
    """
    by_dtype = {getattr(torch, point.dtype): point for point in GRID[:4]}
    if entry is None or not offered:
        return list(_DTYPES[:2])
    asked = [
        (dtype, SlotUnderTest(entry, slot, device), by_dtype[dtype])
        for dtype in _DTYPES
        for slot in offered
    ]
    taken = [dtype for dtype, under, point in asked if under.ask(point, needs_grad=False).accepted]
    return list(dict.fromkeys(taken))[:2] or list(_DTYPES[:2])


def _first_taken(under: SlotUnderTest) -> Point:
    """The base case, batched, in the first dtype that the backend takes; skips the test where it
    takes none.
    """
    said = []
    for dtype in ("bfloat16", "float32", "float16", "float64"):
        base = next(point for point in GRID if point.label == dtype)
        point = dataclasses.replace(base, case=dataclasses.replace(base.case, batch=2))
        answer = under.ask(point, needs_grad=False)
        if answer.accepted:
            return point
        said.append(str(answer))
    pytest.skip("; ".join(dict.fromkeys(said)))


def _grad(under: SlotUnderTest, point: Point) -> bool:
    """Whether to ask for gradients too; skips the test where the backend refuses the forward as
    well.
    """
    answer = under.ask(point, needs_grad=under.differentiable)
    if answer.accepted:
        return under.differentiable
    _complain(point.label, _reason_faults(answer.reasons))
    forward = under.ask(point, needs_grad=False)
    if not forward.accepted:
        _complain(point.label, _reason_faults(forward.reasons))
        pytest.skip(str(forward))
    return False


def _reason_faults(reasons: Any) -> list[str]:
    """What is wrong with a probe's reasons: a fault of the probe itself, a code that is no code, no
    message.
    """
    wrong = []
    for reason in reasons:
        if reason.code in _PROBE_FAULTS:
            wrong.append(reason.message)
        elif not _CODE.fullmatch(reason.code) or not reason.message.strip():
            wrong.append(f"{reason!r} needs a snake_case code and a message")
    return wrong


def _complain(where: str, wrong: list[str]) -> None:
    if wrong:
        pytest.fail(where + ":\n  " + "\n  ".join(wrong), pytrace=False)
