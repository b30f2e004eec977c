"""The conformance suite passes a correct backend and finds planted faults.

It tests a backend only on what the backend declares.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import types
from collections.abc import Sequence

import killers
import pytest
import torch

from nsa_core import NSAError
from nsa_core.contract import SLOTS
from nsa_core.dtypes import dtype_name
from nsa_core.plan.registry import Registry, default_registry
from nsa_verify.conformance import BackendConformance
from nsa_verify.conformance.points import points_of
from nsa_verify.drawn.jobs import OnDrawn
from nsa_verify.drawn.parser import parse
from nsa_verify.isolation.call_guard import guarded_calls
from nsa_verify.run import suite
from semantic.model import FUNCTIONS

FAILURES = (pytest.fail.Exception, NSAError)
SIZES = "l=8 d=4 block=16 n=3 w=24 h=2 groups=2"
WIN = f"win {SIZES} tokens=61"
PACKED = f"win {SIZES} documents=0,5,57,1,17,0"
# The last sequence has a ring that has wrapped around, and three rows of padding.
STEP = f"decode {SIZES} page_size=32 rows=5 lengths=5,3,40,66 new=5,3,5,2"


def job(name: str, case: str) -> suite.Job:
    """Return the verify job of one check and case in float32."""
    matches = [
        j
        for j in suite.jobs("quick", [torch.float32], cases_per_slot=0)
        if (j.name, j.case.name) == (name, case)
    ]
    assert len(matches) == 1
    return matches[0]


def line(text: str) -> suite.Job:
    """Return the verify job of a case, a step or a history."""
    return suite.job_of_line(parse(text))


@pytest.mark.slow  # the default run covers this by the template's own test and by its command
def test_correct_backend_passes(make_suite) -> None:
    conformance = make_suite("sound")
    conformance.test_backend_loads()
    conformance.test_probe_gives_reasons_on_every_device("win")
    for text in (WIN, PACKED, STEP):
        conformance.test_verify(line(text))
    for check in ("operator", "compiled", "two_threads", "grad_modes"):
        conformance.test_kernel("win", check)
    conformance.test_verify(job("run to run", "S=2w"))
    conformance.test_verify(job("decode page order", "h=1"))


def test_plugin_that_imports_torch_is_found(make_suite) -> None:
    plain = make_suite("torch-free")
    faulty = make_suite("torch-bound", {"plugin": ("from nsa_core", "import torch\nfrom nsa_core")})
    with pytest.raises(pytest.skip.Exception, match="is not installed"):
        plain.test_plugin_imports_no_torch()
    for suite_ in (plain, faulty):
        entry = suite_.registry.get(suite_.backend)
        point = f"nsa_backend_{suite_.backend.replace('-', '_')}.plugin"
        suite_.registry = Registry((dataclasses.replace(entry, entry_point=point),))
    plain.test_plugin_imports_no_torch()
    message = "torch-bound 0, entry point nsa_backend_torch_bound.plugin:\n  it imports torch"
    with pytest.raises(pytest.fail.Exception, match=message):
        faulty.test_plugin_imports_no_torch()


@pytest.mark.parametrize(
    ("form", "missing"),
    [("step", "decode of cmp, select, sel"), ("backward", "backward of sel, combine")],
)
def test_fused_form_that_is_never_used_is_found(make_suite, form: str, missing: str) -> None:
    """Nothing else imports or runs it: its function does not exist."""
    line = f'fused={{"{form}": "nsa_backend_idle_{form}.win:missing"}}, priority='
    idle = make_suite(f"idle-{form}", {"plugin": ("priority=", line)})
    message = rf"idle-{form} 0:\n  fused\['{form}'\] is never used without {missing}; offer"
    with pytest.raises(pytest.fail.Exception, match=message):
        idle.test_backend_loads()


WIDE_WINDOW = ("torch.arange(window,", "torch.arange(window + 1,")
FAULTS = {
    "window-one-too-wide": ("win", *WIDE_WINDOW),
    "sees-the-future": ("win", "keys = rows -", "keys = (rows + 1).clamp(max=tokens - 1) -"),
    "log2": ("win", "scores.logsumexp(-1)", "scores.logsumexp(-1) * 1.4426950408889634"),
    "gradient-twice": (
        "win",
        "vjp(do.to(unrounded_o.dtype))",
        "vjp(2 * do.to(unrounded_o.dtype))",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_kernel_fails_accepted_requests(make_suite, fault: str) -> None:
    module, *change = FAULTS[fault]
    with pytest.raises(FAILURES, match="generated win, given line:\n  win "):
        make_suite("faulty-" + fault, {module: change}).test_verify(line(WIN))


def test_wrong_gradient_of_a_deterministic_kernel_is_found(make_suite) -> None:
    """Drawn cases do not require deterministic kernels."""
    old, new = "dq.contiguous(), dk.contiguous()", "dq.contiguous(), dk * (1 + 0.05 * {0})"
    faulty = make_suite("deterministic", {"win": (old, new.format("call.deterministic"))})
    faulty.test_verify(line(WIN))
    with pytest.raises(FAILURES, match="run to run, S=2w:\n  win dk: row"):
        faulty.test_verify(job("run to run", "S=2w"))


@pytest.mark.parametrize(
    ("kind", "width"), [("win", 65), ("win", 96), ("win", 320), ("decode", 320)]
)
def test_kernel_that_is_wrong_for_a_width_fails(make_suite, kind: str, width: int) -> None:
    """Only edges have these widths."""
    wrong = f"call.scale * (1 + 0.05 * (q.shape[-1] == {width}))"
    faulty = make_suite(f"width-{kind}-{width}", {kind: ("call.scale", wrong)})
    jobs = suite.jobs("quick", [torch.float32])
    drawn = [job for job in jobs if isinstance(job.check, OnDrawn)]
    start = re.compile(f"{kind} .*dk={width} dv={width} ")
    (edge,) = [job for job in drawn if start.match(str(job.check.drawn))]
    with pytest.raises(FAILURES, match="edge"):
        faulty.test_verify(edge)


STEP_FAULTS = {
    "step-window-one-too-wide": (
        "distance < call.geometry.window_size",
        "distance <= call.geometry.window_size",
    ),
    "step-sees-later-rows": ("(distance >= 0) & ", ""),
    "step-reads-unused-memory": (
        "~visible.any(1)[..., None, None]",
        "(key_token < -9999)[..., None, None]",
    ),
    "step-padding": ("(query_token <= newest)", "(query_token <= newest + 1)"),
    "step-ring": (
        "ring_size, device=q.device)) % ring_size",
        "ring_size, device=q.device)) % (ring_size + 1)",
    ),
}


@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_faulty_decode_form_fails_accepted_requests(make_suite, fault: str) -> None:
    faulty = make_suite(fault, {"decode": STEP_FAULTS[fault]})
    with pytest.raises(FAILURES, match="generated steps, given line:\n  win "):
        faulty.test_verify(line(STEP))
    killers.expect("conformance", fault, "generated steps")


def test_a_slot_that_refuses_a_job_does_not_keep_the_others_from_it(make_suite) -> None:
    """The decode form of win is judged although the backend has a cmp without one."""
    faulty = make_suite("two-slots", {"decode": STEP_FAULTS["step-padding"]})
    entry = faulty.registry.get("two-slots")
    slots = {"cmp": default_registry().get("sdpa").spec.slots["cmp"], **entry.spec.slots}
    slots["cmp"] = dataclasses.replace(slots["cmp"], decode=None)
    spec = dataclasses.replace(entry.spec, slots=slots)
    type(faulty).registry = default_registry().with_backend(spec)
    with pytest.raises(FAILURES, match="generated steps, given line:\n  win "):
        faulty.test_verify(line(STEP))


def test_decode_forms_alone_are_tested(make_suite) -> None:
    text = 'decode="nsa_backend_prefill_only.decode:win",'
    plain = make_suite("prefill-only", {"plugin": (text, "")})
    plain.test_probe_gives_reasons_on_every_device("win")
    with pytest.raises(pytest.skip.Exception, match="declares no decode form"):
        plain.test_decode_workspace("no decode form")
    with pytest.raises(pytest.skip.Exception, match="has no decode form of win"):
        plain.test_verify(line(STEP))


class TestThreads:
    """The suite's fixture, alone."""

    backend, registry = "sdpa", None
    _set_up = BackendConformance._set_up

    @pytest.fixture(scope="class", autouse=True)
    def _two_threads(self):
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        yield
        assert torch.get_num_threads() == 2, "the suite does not restore the number of threads"
        torch.set_num_threads(before)

    def test_the_suite_runs_on_one_thread(self) -> None:
        assert torch.get_num_threads() == 1


def test_attention_across_documents_fails_the_packed_point(make_suite) -> None:
    faulty = make_suite(
        "mixes-documents", {"win": (" & (document[keys.clamp(min=0)] == document[rows])", "")}
    )
    faulty.test_verify(line(f"win {SIZES} documents=61"))
    with pytest.raises(FAILURES, match="generated win, given line"):
        faulty.test_verify(line(PACKED))


def test_probe_that_accepts_an_unsupported_dtype_is_found(make_suite) -> None:
    refuses = "if q.dtype == torch.float64:\n            raise TypeError('no float64')\n        "
    faulty = make_suite(
        "promises",
        {"win": ("o, lse = attend(q, k, v, call)", refuses + "o, lse = attend(q, k, v, call)")},
    )
    with pytest.raises(FAILURES, match="no float64"):
        faulty.test_verify(line(f"{WIN} dtype=float64"))


@pytest.mark.parametrize(
    ("name", "reasons", "match"),
    [
        ("code", "[Reason('Not A Code', 'no')]", "snake_case"),
        ("text", "[Reason('no', ' ')]", "a message"),
        ("raises", "1 // 0", "ZeroDivisionError"),
        ("none", "None", "not a list of Reasons"),
        ("decode", "[3] * (request.phase == 'decode')", "item 0 of its probe's list is int"),
        ("random", "[Reason('no', str(__import__('time').perf_counter()))]", "different results"),
    ],
)
def test_faulty_probe_is_found(make_suite, name: str, reasons: str, match: str) -> None:
    faulty = make_suite(f"bad-probe-{name}", {"probe": ("return reasons", f"return {reasons}")})
    with pytest.raises(FAILURES, match=match):
        faulty.test_probe_gives_reasons_on_every_device("win")


@pytest.mark.parametrize(
    ("name", "result", "match"),
    [
        ("raises", "1 // 0", "bad-rank-raises 0, win, win .* on cpu:\n  its rank raised ZeroDiv"),
        ("float", "2.5", "its rank returned float, not an integer or a Rank"),
        ("random", "__import__('time').perf_counter_ns()", "rank gives different results"),
    ],
)
def test_faulty_rank_is_found(make_suite, name: str, result: str, match: str) -> None:
    """Plans leave the backend out, so that the checks of `nsa verify` would all be skipped."""
    path = f"nsa_backend_bad_rank_{name}.probe:rank"
    rank = f"def rank(request):\n    return {result}\n\n\ndef probe("
    changes = {"plugin": ("priority=", f'rank="{path}", priority='), "probe": ("def probe(", rank)}
    faulty = make_suite(f"bad-rank-{name}", changes)
    with pytest.raises(FAILURES, match=match):
        faulty.test_probe_gives_reasons_on_every_device("win")


FIRST_LINE = "groups, tokens, window ="  # of attend; faults are inserted before it
DENSE = "{0} = {0}.as_strided({0}.shape, torch.empty({0}.shape).stride())"
SHARED = "import time\n    attend.shared = q\n    time.sleep(0.02)\n    q = attend.shared"
RESULT = "return o.to(q.dtype), lse"
FAULTY = {
    "two_threads": (FIRST_LINE, f"{SHARED}\n    {FIRST_LINE}"),
    "grad_modes": (RESULT, "return o.to(q.dtype) + torch.is_inference_mode_enabled(), lse"),
    "operator": (RESULT, f"q.mul_(1.5)\n        {RESULT}"),
}
LAYOUTS = {"gaps": "q", "expanded": "k"}  # layout -> the tensor that is read as contiguous


@pytest.mark.few_cases("grad_modes", "operator")
@pytest.mark.parametrize("check", FAULTY)
def test_faulty_kernel_fails_its_check(make_suite, check: str) -> None:
    faulty = make_suite("faulty-" + check.replace("_", "-"), {"win": FAULTY[check]})
    # opcheck raises its own error. pytest.fail raises a BaseException that is no Exception.
    with pytest.raises((*FAILURES, Exception), match=f"win, {check}|opcheck"):
        faulty.test_kernel("win", check)
    killers.expect("conformance", check, f"test_kernel {check}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernel_that_reads_contiguous_memory_fails(make_suite, layout: str) -> None:
    change = (FIRST_LINE, f"{DENSE.format(LAYOUTS[layout])}\n    {FIRST_LINE}")
    faulty = make_suite(f"faulty-{layout}", {"win": change})
    faulty.test_verify(line(f"{WIN} batch=2"))
    with pytest.raises(FAILURES, match="generated win, given line:\n  win "):
        faulty.test_verify(line(f"{WIN} batch=2 layout={layout}"))
    killers.expect("conformance", layout, "generated win")


def test_kernel_that_writes_to_its_inputs_fails_verify(make_suite) -> None:
    faulty = make_suite(
        "writes",
        {
            "win": (
                "o, lse = attend(q, k, v, call)",
                "o, lse = attend(q, k, v, call)\n        v.mul_(2)",
            )
        },
    )
    with pytest.raises(FAILURES, match="slot 'win', forward: it changed argument 3 in place"):
        faulty.test_verify(line(WIN))


@pytest.mark.parametrize(
    ("name", "size", "match"),
    [
        ("about-right", "peak", None),
        ("too-small", "peak // 3", r"expected \d+ to \d+, because a run allocates \d+"),
        ("in-bits", "8 * peak", "workspace 'nsa_backend_in_bits.win:size' returns 12971776 bytes"),
        ("float", "float(peak)", r"returns 1621472\.0 bytes"),
    ],
)
def test_wrong_workspace_is_found(make_suite, name: str, size: str, match: str | None) -> None:
    """The bytes that the template allocates at its peak, in its backward."""
    path = f"nsa_backend_{name.replace('-', '_')}.win:size"
    function = f"def size(request, peak=1621472):\n    return {size}\n\n\ndef forward("
    stating = make_suite(
        name,
        {
            "plugin": ("deterministic=", f'workspace="{path}", deterministic='),
            "win": ("def forward(", function),
        },
    )
    if match is None:
        stating.test_kernel("win", "workspace")
        return
    with pytest.raises(pytest.fail.Exception, match=match):
        stating.test_kernel("win", "workspace")


@pytest.mark.parametrize(
    ("name", "size", "match"),
    [
        (
            "step-about-right",
            "-(-peak // 2)",
            None,
        ),  # without the memory of the guard
        (
            "step-too-small",
            "peak // 3",
            r"win, bfloat16:\n  decode_workspace .* expected \d+ to \d+",
        ),
    ],
)
def test_wrong_decode_workspace_is_found(make_suite, name, size, match) -> None:
    """The bytes that the decode form of the template allocates for 64 sequences."""
    path = f"nsa_backend_{name.replace('-', '_')}.decode:size"
    function = f"def size(request, peak=701960):\n    return {size}\n\n\ndef win("
    stating = make_suite(
        name,
        {
            "plugin": ("deterministic=", f'decode_workspace="{path}", deterministic='),
            "decode": ("def win(", function),
        },
    )
    found = pytest.raises(pytest.fail.Exception, match=match) if match else contextlib.nullcontext()
    with guarded_calls(), found:
        stating.test_decode_workspace("win")


PEAKS = {"backward": 4487346, "step": 481756, "compress": 77952, "gates": 3072}  # bytes of the toys
FUSED = {
    "backward": "fused_toy:backward",
    "step": "toy_forms:step",
    "compress": "toy_forms:compress",
    "gates": "toy_forms:gates",
}


@pytest.mark.parametrize("form", FUSED)
@pytest.mark.parametrize(
    ("factor", "match"), [(1, None), (0, "expected .* because a run allocates")]
)
def test_wrong_workspace_of_a_fused_form_is_found(form, factor, match, monkeypatch) -> None:
    FUNCTIONS.fused_size = lambda request: factor * PEAKS[form]
    suite_ = with_fused_form(form, SLOTS, monkeypatch)
    found = pytest.raises(pytest.fail.Exception, match=match) if match else contextlib.nullcontext()
    with guarded_calls(), found:
        suite_.test_fused_workspace(form)


def with_fused_form(form: str, slots: Sequence[str], monkeypatch) -> BackendConformance:
    """Return the suite of a backend with ``slots`` of sdpa, and a fused form."""
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[1] / "checks"))
    sdpa = default_registry().get("sdpa").spec
    spec = dataclasses.replace(
        sdpa,
        name="fused",
        slots={slot: sdpa.slots[slot] for slot in slots},
        fused={form: FUSED[form]},
        fused_workspace={form: f"{FUNCTIONS.__name__}:fused_size"},
    )
    registry = Registry().with_backend(sdpa).with_backend(spec)
    suite_ = type("Suite", (BackendConformance,), {"registry": registry})()
    suite_.backend, suite_._device = "fused", "cpu"
    return suite_


@pytest.mark.parametrize("form", FUSED)
def test_workspace_of_a_fused_form_that_is_not_called_is_skipped(form, monkeypatch) -> None:
    suite_ = with_fused_form(form, ("win",), monkeypatch)
    with guarded_calls(), pytest.raises(pytest.skip.Exception, match="calls no fused"):
        suite_.test_fused_workspace(form)


def test_workspace_is_skipped_if_not_stated(make_suite) -> None:
    with pytest.raises(pytest.skip.Exception, match="states no workspace"):
        make_suite("silent").test_kernel("win", "workspace")
    with pytest.raises(pytest.skip.Exception, match="states no fused_workspace"):
        make_suite("silent-form").test_fused_workspace("no fused form")
    with pytest.raises(pytest.skip.Exception, match="states no decode_workspace"):
        make_suite("silent-step").test_decode_workspace("win")


def test_evidence_that_no_profile_has_fails_verify(make_suite) -> None:
    unseen = make_suite(
        "unseen", {"plugin": ('evidence=("nsa_backend_unseen.win"', 'evidence=("my_kernel"')}
    )
    message = "win profile: profile shows no event of SlotSpec.evidence: my_kernel"
    with pytest.raises(pytest.fail.Exception, match=message):
        unseen.test_verify(job("dispatch", "S=1"))


WITHOUT_BACKWARD = ("        backward=", "        workspace=None and ")


def test_backend_without_backward_is_judged_on_its_forward(make_suite) -> None:
    forward_only = make_suite("forward-only", {"plugin": WITHOUT_BACKWARD})
    forward_only.test_verify(line(WIN))
    forward_only.test_kernel("win", "operator")
    faulty = make_suite(
        "forward-faulty",
        {"plugin": WITHOUT_BACKWARD, "win": WIDE_WINDOW},
    )
    with pytest.raises(FAILURES):
        faulty.test_verify(line(WIN))


@pytest.mark.slow
def test_refused_requests_are_skipped_with_the_reason(make_suite) -> None:
    refuse = (
        "if request.dtype == 'float16':\n        reasons.append(Reason('fp16', 'takes no fp16'))\n "
        "   return reasons"
    )
    refusing = make_suite("refusing", {"probe": ("return reasons", refuse)})
    refusing.test_verify(line(WIN))
    with pytest.raises(pytest.skip.Exception, match="takes no fp16"):
        refusing.test_verify(line(f"{WIN} dtype=float16"))
    half = dataclasses.replace(job("parity", "S=1"), dtype=torch.float16)
    with pytest.raises(pytest.skip.Exception, match="takes no fp16"):
        refusing.test_verify(half)


@pytest.mark.few_cases("no-half-request.dtype == 'float16'-float32 bfloat16 float64")
@pytest.mark.parametrize(
    ("name", "refused", "expected"),
    [
        ("all-dtypes", "False", "float32 bfloat16 float16 float64"),
        ("no-half", "request.dtype == 'float16'", "float32 bfloat16 float64"),
        (
            "small-wide",
            "request.dtype == 'float64' and request.head_dim < 60",
            "float32 bfloat16 float16 float64",
        ),
        (
            "decode-half",
            "request.dtype == 'float16' and request.phase != 'decode'",
            "float32 bfloat16 float16 float64",
        ),
        ("refuses-all", "True", "float32 bfloat16 float16 float64"),
    ],
)
def test_verify_jobs_run_in_every_accepted_dtype(make_suite, name, refused, expected) -> None:
    refuse = f"if {refused}:\n        reasons.append(Reason('no', 'no'))\n    return reasons"
    conformance = make_suite(name, {"probe": ("return reasons", refuse)})
    conformance.__class__.backend = name
    arguments: list[suite.Job] = []
    metafunc = types.SimpleNamespace(
        fixturenames=["job"],
        config=types.SimpleNamespace(option=types.SimpleNamespace(nsa_device="cpu")),
        parametrize=lambda _, jobs, ids: arguments.extend(jobs),
    )
    conformance.pytest_generate_tests(metafunc)
    for check in ("parity", "decode"):
        dtypes = {dtype_name(job.dtype): 0 for job in arguments if job.name == check}
        assert " ".join(dtypes) == expected


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("nonesuch", "cpu", "unknown backend 'nonesuch' .*; install the distribution"),
        (3, "cpu", "set the class attribute backend"),
        ("sdpa", "cuda", "--nsa-device: device 'cuda' cannot be used"),
        ("sdpa", "tpu", "--nsa-device: device 'tpu' is not one that torch knows"),
    ],
)
def test_a_wrong_name_or_device_is_one_error_of_collection(
    backend: object, device: str, message: str, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    conformance = type("Suite", (BackendConformance,), {"backend": backend})()
    option = types.SimpleNamespace(nsa_device=device)
    metafunc = types.SimpleNamespace(
        cls=type(conformance), fixturenames=["job"], config=types.SimpleNamespace(option=option)
    )
    with pytest.raises(pytest.UsageError, match=message):
        conformance.pytest_generate_tests(metafunc)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("newer", ("(1, 1)", "(1, 2)"), "newer 0 is incompatible: written for contract 1.2"),
        ("bad-spec", ("priority=-10", "priority='low'"), "bad-spec 0 is broken: priority must be"),
    ],
)
def test_a_plugin_that_does_not_load_is_one_error_of_collection(
    make_suite, name: str, change: tuple[str, str], message: str
) -> None:
    conformance = make_suite(name, {"plugin": change})
    with pytest.raises(pytest.UsageError, match=message):
        conformance.pytest_generate_tests(types.SimpleNamespace(fixturenames=[]))


def test_requests_cover_lengths_dtypes_and_pages() -> None:
    for slot in SLOTS:
        points = points_of(slot)
        assert {p.dtype for p in points} == {"bfloat16", "float16", "float32", "float64"}
        assert {0, 61} <= {p.case.tokens for p in points}
        assert {0, 1, 5} <= {p.case.batch for p in points}
        assert {p.step.page_size is None for p in points if p.step} == {True, False}


def test_kernel_declared_deterministic_fails_if_its_bits_change(make_suite) -> None:
    random = "return (o * (1 + 2.0**-12 * torch.rand_like(o))).to(q.dtype), lse"
    faulty = make_suite("random-bits", {"win": (RESULT, random)})
    with pytest.raises(FAILURES, match="bits differ from the first call of the thread"):
        faulty.test_kernel("win", "two_threads")
