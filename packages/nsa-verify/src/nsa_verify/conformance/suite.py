"""The conformance suite: the tests that a backend must pass on every request that it accepts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from nsa_core.contract import SLOTS, import_named
from nsa_core.dtypes import dtype_name
from nsa_core.errors import BackendUnavailable, InvalidInput
from nsa_core.plan.candidates import probe_candidate, with_rank
from nsa_core.plan.loading import BackendEntry
from nsa_core.plan.options import usable_device
from nsa_core.plan.plugin_calls import FAULTS
from nsa_core.plan.registry import Registry, default_registry
from nsa_verify.conformance.fused_workspace import fused_workspace_faults
from nsa_verify.conformance.kernel_checks import KernelChecks, workspace_faults
from nsa_verify.conformance.points import MANY_SEQUENCES, TWO_SEQUENCES, Point, points_of
from nsa_verify.conformance.slot_under_test import SlotUnderTest
from nsa_verify.drawn.jobs import OnDrawn
from nsa_verify.isolation.call_guard import guarded_calls
from nsa_verify.problems.combination import Combination, accepted_dtypes
from nsa_verify.problems.findings import Finding
from nsa_verify.run import suite
from nsa_verify.run.contexts import context_of

# A probe sees metadata only, so it must handle devices that this machine does not have.
DEVICES: tuple[tuple[str, tuple[int, int] | None], ...] = (
    ("cpu", None),
    ("cuda", (7, 5)),
    ("cuda", (8, 0)),
    ("cuda", (9, 0)),
    ("cuda", (12, 0)),
    ("meta", None),
    ("xpu", None),
)
_CODE = re.compile(r"[a-z][a-z0-9_]*")
_KERNEL_CHECKS = (
    "operator",
    "compiled",
    "cuda_graph",
    "long_offsets",
    "two_threads",
    "grad_modes",
    "workspace",
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class BackendConformance:
    """Base class of the conformance tests of a backend.

    Derive a class whose name starts with Test and set ``backend``; pytest collects the tests.
    Requests that the probe refuses are skipped with its reasons, so a backend is tested only on
    what it declares.

    Attributes:
        backend: Name of the backend.
        registry: Registry of backends; None uses the installed plugins.

    Example:
        >>> from nsa_verify.conformance import BackendConformance
        >>> class TestMine(BackendConformance):
        ...     backend = "mine"
    """

    backend: ClassVar[str] = ""
    registry: ClassVar[Registry | None] = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize the tests over slots and verify jobs."""
        if not isinstance(self.backend, str) or not self.backend:
            raise pytest.UsageError(
                f"{metafunc.cls} has no backend: set the class attribute backend = 'name'"
            )
        entry = _find(self.backend, self.registry)
        offered = [slot for slot in SLOTS if entry.spec and slot in entry.spec.slots]
        if "job" in metafunc.fixturenames:
            option = metafunc.config.option
            dtypes = _accepted_dtypes(entry, offered, _device(option))
            todo = suite.jobs(getattr(option, "nsa_preset", "quick"), dtypes)
            todo = [job for job in todo if _concerns(job, offered)]
            labels = [f"{job.name}-{job.case.name}-{dtype_name(job.dtype)}" for job in todo]
            metafunc.parametrize("job", todo, ids=labels)
        forms = [s for s in offered if entry.spec and entry.spec.slots[s].decode]
        for fixture, values in (
            ("slot", offered or ["no slot"]),
            ("form", forms or ["no decode form"]),
            ("check", _KERNEL_CHECKS),
            (
                "fused",
                [*entry.spec.fused] if entry.spec and entry.spec.fused else ["no fused form"],
            ),
        ):
            if fixture in metafunc.fixturenames:
                metafunc.parametrize(fixture, values)

    @pytest.fixture(autouse=True)
    def _set_up(self, pytestconfig: pytest.Config) -> Iterator[None]:
        self._device = _device(pytestconfig.option)
        entry = _find(self.backend, self.registry)
        context = context_of(entry, self._device) or contextlib.nullcontext()
        with context, _one_thread(), guarded_calls():
            yield

    def test_backend_loads(self) -> None:
        """The backend is ready and its fused forms are used; skipped if it cannot run here."""
        entry = self._entry()
        assert entry.spec is not None  # _entry skips or fails otherwise
        for form in entry.spec.fused:
            # Another backend may run cmp, select has no backward, and combine no decode form.
            if form == "backward":
                part, slots = "backward", {"sel", "win", "combine"}
            else:
                part, slots = "decode", {"cmp", "select", "sel", "win"}
            offered = {name for name, spec in entry.spec.slots.items() if getattr(spec, part)}
            if missing := ", ".join(slot for slot in SLOTS if slot in slots - offered):
                text = f"is never used without {part} of {missing}; offer them, or remove it"
                _fail_if([f"fused[{form!r}] {text}"], entry.title)

    def test_plugin_imports_no_torch(self) -> None:
        """The entry point and its hook import no torch, so that listing stays fast."""
        entry = self._entry()
        if not entry.entry_point:
            pytest.skip("the backend is not installed: this process registered it")
        load = f"loading.call_plugin(loading.Plugin('', '', '', {entry.entry_point!r}))"
        code = f"from nsa_core.plan import loading; {load}; print('torch' in sys.modules)"
        code = f"import sys; sys.path[:] = {[*map(str, sys.path)]}; {code}"
        if subprocess.check_output([sys.executable, "-c", code], text=True).endswith("True\n"):
            fault = "it imports torch; import torch only in the modules of the functions"
            _fail_if([fault], f"{entry.title}, entry point {entry.entry_point}")

    def test_probe_gives_reasons_on_every_device(self, slot: str) -> None:
        """Probe and rank handle every request, prefill and decode, with the same result twice."""
        entry = self._entry()
        options: list[dict[str, bool]] = [{}, {"needs_grad": True}, {"sized": False}]
        requests = itertools.product(points_of(slot), DEVICES, options)
        for point, (device, capability), fields in requests:
            request = point.request(slot, device, capability, **fields)
            where = f"{entry.title}, {slot}, {point.case.name} on {device}{capability or ''}"
            probed = [probe_candidate(entry, request) for _ in range(2)]
            (first, _), (second, _) = (with_rank(entry, request, one) for one in probed)
            _fail_if(_reason_faults(first.reasons), where)
            if first != second:
                pytest.fail(f"{where}: probe or rank gives different results for the same request")

    def test_kernel(self, slot: str, check: str) -> None:
        """The kernel passes opcheck, compilation, threads, grad modes and others."""
        subject = SlotUnderTest(self._entry(), slot, self._device)
        if check in ("cuda_graph", "long_offsets") and torch.device(self._device).type != "cuda":
            pytest.skip("needs a CUDA GPU")
        if check == "workspace" and subject.spec.workspace is None:
            pytest.skip("the backend states no workspace")
        point = _first_accepted(subject, TWO_SEQUENCES)
        checks = KernelChecks(subject, point, _grad(subject, point))
        _fail_if(list(getattr(checks, check)()), f"{slot}, {check}, {point.dtype}")

    def test_decode_workspace(self, form: str) -> None:
        """A stated workspace of a decode form is within a factor of two of a measured one."""
        if form == "no decode form":
            pytest.skip("the backend declares no decode form")
        subject = SlotUnderTest(self._entry(), form, self._device)
        if (path := subject.spec.decode_workspace) is None:
            pytest.skip("the backend states no decode_workspace")
        point = _first_accepted(subject, MANY_SEQUENCES)
        assert subject.spec.decode is not None  # forms are declared ones only
        inputs, call = subject.step_inputs(point)
        # A call through nsa_core would count what the guard of calls allocates.
        run = functools.partial(import_named(subject.spec.decode), *inputs, call=call)
        faults = [*workspace_faults("decode_workspace", path, subject.request(point), run)]
        _fail_if(faults, f"{form}, {point.dtype}")

    def test_fused_workspace(self, fused: str) -> None:
        """A stated workspace of a fused form is within a factor of two of a measured one."""
        entry = self._entry()
        assert entry.spec is not None  # _entry skips or fails otherwise
        if (path := entry.spec.fused_workspace.get(fused)) is None:
            pytest.skip("the backend states no fused_workspace")
        combination = Combination(
            dict.fromkeys(entry.spec.slots, entry.name), self._device, self.registry
        )
        phase = {"decode": True} if fused != "backward" else {}
        accepted = accepted_dtypes(combination, _DTYPES, **phase)
        if not accepted:
            pytest.skip("the backend refuses the fused form in every dtype")
        _fail_if([*fused_workspace_faults(combination, fused, path, accepted[0])], fused)

    def test_verify(self, job: suite.Job) -> None:
        """The checks of `nsa verify` pass with this backend in every slot that it offers."""
        entry = self._entry()
        assert entry.spec is not None  # _entry skips or fails otherwise
        offered = [*entry.spec.slots]
        own: list[Finding] = []
        # If one slot refuses the job, run it for each slot alone.
        for slots in (offered, *([slot] for slot in offered if len(offered) > 1)):
            combination = Combination(dict.fromkeys(slots, entry.name), self._device, self.registry)
            # Ignore slots that other backends fill. A finding without a slot concerns all slots.
            own += [f for f in job.run(combination) if f.slot in slots or f.slot not in SLOTS]
            if any(f.ok is not None for f in own) and slots is offered:
                break
        failures = [f"{f.slot} {f.quantity}: {f.detail}" for f in own if f.ok is False]
        _fail_if(failures, f"{job.name}, {job.case.name}")
        if not any(f.ok for f in own):
            reasons = {f.detail for f in own if f.detail} or {"does not apply to this case"}
            pytest.skip("; ".join(sorted(reasons)))

    def _entry(self) -> BackendEntry:
        entry = _find(self.backend, self.registry)
        if entry.status != "ready":
            pytest.skip(f"{entry.title} is {entry.status}: {entry.reason}")
        return entry


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run PyTorch on one CPU thread: for these small cases, waking threads takes longest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _find(name: str, registry: Registry | None) -> BackendEntry:
    """Return a backend that is ready, unavailable or disabled; raise UsageError for any other."""
    try:
        entry = (default_registry() if registry is None else registry).get(name)
    except InvalidInput as error:
        raise pytest.UsageError(f"{error}; install the distribution of the backend") from None
    if entry.status in ("broken", "incompatible"):
        raise pytest.UsageError(f"{entry.title} is {entry.status}: {entry.reason}")
    return entry


def _device(option: Any) -> str:
    device: str = getattr(option, "nsa_device", "auto")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return str(usable_device(device))
    except (InvalidInput, BackendUnavailable) as error:
        raise pytest.UsageError(f"--nsa-device: {error}") from None


def _concerns(job: suite.Job, offered: list[str]) -> bool:
    """Return whether ``job`` judges an offered slot: a drawn case may be one of another slot."""
    drawn = job.check.drawn if isinstance(job.check, OnDrawn) else None
    slot = getattr(drawn, "kernel", None) or getattr(drawn, "slot", "")
    return slot not in SLOTS or slot in offered


def _accepted_dtypes(entry: BackendEntry, offered: list[str], device: str) -> list[torch.dtype]:
    """Return the dtypes of the verify jobs: those in which the probe accepts a request.

    If it accepts none, the result is every dtype: each job is skipped with the reasons.
    """
    subjects = [SlotUnderTest(entry, slot, device) for slot in offered]
    accepted = [
        dtype
        for dtype in _DTYPES
        if any(
            subject.probe(point).accepted
            for subject in subjects
            for point in points_of(subject.slot)
            if point.dtype == dtype_name(dtype)
        )
    ]
    return accepted or list(_DTYPES)


def _first_accepted(subject: SlotUnderTest, base: Point) -> Point:
    """Return ``base`` in the first accepted dtype; skip the test without one."""
    refusals = []
    for dtype in ("bfloat16", "float32", "float16", "float64"):
        point = dataclasses.replace(base, dtype=dtype)
        answer = subject.probe(point)
        if answer.accepted:
            return point
        refusals.append(str(answer))
    pytest.skip("; ".join(dict.fromkeys(refusals)))


def _grad(subject: SlotUnderTest, point: Point) -> bool:
    """Return whether to compute gradients; skip the test if the forward is refused as well."""
    answer = subject.probe(point, needs_grad=subject.differentiable)
    if answer.accepted:
        return subject.differentiable
    _fail_if(_reason_faults(answer.reasons), point.case.name)
    forward = subject.probe(point)
    if not forward.accepted:
        _fail_if(_reason_faults(forward.reasons), point.case.name)
        pytest.skip(str(forward))
    return False


def _reason_faults(reasons: Any) -> list[str]:
    """List faults of probe and rank, and reasons without a valid code or a message."""
    faults = []
    for reason in reasons:
        if reason.code in FAULTS:
            faults.append(reason.message)
        elif not _CODE.fullmatch(reason.code) or not reason.message.strip():
            faults.append(f"{reason!r} needs a snake_case code and a message")
    return faults


def _fail_if(faults: list[str], where: str) -> None:
    """Fail the test if there are faults."""
    if faults:
        pytest.fail(where + ":\n  " + "\n  ".join(faults), pytrace=False)
