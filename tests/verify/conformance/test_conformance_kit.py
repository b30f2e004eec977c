"""The kit passes a sound backend, finds what is planted in an unsound one, and asks no more than
was declared.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsa_core import NSAError
from nsa_core.dispatch.registry import default_registry
from nsa_verify.cases import quick_cases
from nsa_verify.conformance import BackendConformance
from nsa_verify.conformance.grid import Point
from nsa_verify.conformance.slot_under_test import SlotUnderTest, faults
from nsa_verify.conformance.suite import GRID, STEPS
from nsa_verify.run import suite

POINTS = {point.label: point for point in GRID}
RED = (pytest.fail.Exception, NSAError)


def job(name: str, case: str) -> suite.Job:
    """One job of the verify checks, by check and case, in fp32."""
    found = [
        j
        for j in suite.jobs("quick", [torch.float32], text=None)
        if (j.name, j.case.name) == (name, case)
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.slow  # in the ordinary run the template's own test, and its command, say so
def test_a_sound_backend_passes(made) -> None:
    sound = made("sound")
    sound.test_is_installed_and_loads()
    sound.test_probe_answers_about_every_device("win")
    for point in GRID:
        sound.test_probe_tells_the_truth("win", point)
    sound.test_probe_answers_about_decode_on_every_device("win")
    for step in STEPS:
        sound.test_probe_tells_the_truth_of_decode("win", step)
    for check in ("operator", "compiled", "strided", "expanded", "two_threads", "grad_modes"):
        sound.test_kernel("win", check)
    sound.test_verify(job("inputs untouched", "S=2w"))
    sound.test_verify(job("decode page order", "h=1"))


FAULTS = {
    "window-one-too-wide": ("win", "distance < window", "distance <= window"),
    "sees-the-future": ("win", "(distance >= 0) & ", ""),
    "log2": ("win", "scores.logsumexp(-1)", "scores.logsumexp(-1) * 1.4426950408889634"),
    "gradient-twice": (
        "win",
        "pullback(do.to(exact_o.dtype))",
        "pullback(2 * do.to(exact_o.dtype))",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_found_by_probe_truth(made, fault: str) -> None:
    module, *change = FAULTS[fault]
    with pytest.raises(RED, match="win, float32"):
        made("wrong-" + fault, {module: change}).test_probe_tells_the_truth(
            "win", POINTS["float32"]
        )


STEP_FAULTS = {
    "step-window-one-too-wide": (
        "behind < call.geometry.window_size",
        "behind <= call.geometry.window_size",
    ),
    "step-sees-later-rows": ("(behind >= 0) & ", ""),
    "step-reads-what-nobody-owns": (
        "(held < 0)[..., None, None]",
        "(held < -9999)[..., None, None]",
    ),
    "step-padding": ("(token <= newest)", "(token <= newest + 1)"),
    "step-ring": ("ring, device=q.device)) % ring", "ring, device=q.device)) % (ring + 1)"),
}


@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_a_wrong_decode_form_is_found_by_probe_truth(made, fault: str) -> None:
    wrong = made(fault, {"decode": STEP_FAULTS[fault]})
    with pytest.raises(RED, match="win, step, five rows, pages"):
        wrong.test_probe_tells_the_truth_of_decode(
            "win", next(s for s in STEPS if s.label == "step, five rows, pages")
        )


def test_every_slot_of_a_backend_can_be_held_to_its_decode_forms() -> None:
    """select and sel are given what the oracle makes of the step."""
    suite_of_sdpa = type("Suite", (BackendConformance,), {})()
    suite_of_sdpa._name, suite_of_sdpa._device = "sdpa", "cpu"
    for form in ("cmp", "select", "sel", "win"):
        for step in (STEPS[0], *STEPS[8:10]):
            suite_of_sdpa.test_probe_tells_the_truth_of_decode(form, step)


def test_a_backend_without_decode_forms_is_not_asked_for_them(made) -> None:
    line = 'decode="nsa_backend_prefill_only.decode:win",'
    plain = made("prefill-only", {"plugin": (line, "")})
    plain.test_probe_answers_about_decode_on_every_device("win")
    with pytest.raises(pytest.skip.Exception, match="declares no decode form"):
        plain.test_probe_tells_the_truth_of_decode("no decode form", STEPS[0])
    with pytest.raises(pytest.skip.Exception, match="has no decode form of win"):
        plain.test_probe_tells_the_truth_of_decode("win", STEPS[0])


def test_documents_that_see_each_other_are_found_by_the_packed_point(made) -> None:
    wrong = made("mixes-documents", {"win": (" & (document[rows, None] == document[keys])", "")})
    wrong.test_probe_tells_the_truth("win", POINTS["packed, one document"])
    with pytest.raises(RED, match="win, packed"):
        wrong.test_probe_tells_the_truth("win", POINTS["packed"])


def test_a_probe_that_promises_too_much_is_found(made) -> None:
    refuses = "if q.dtype == torch.float64:\n            raise TypeError('no float64')\n        "
    wrong = made(
        "promises",
        {"win": ("o, lse = attend(q, k, v, call)", refuses + "o, lse = attend(q, k, v, call)")},
    )
    with pytest.raises(RED, match="no float64"):
        wrong.test_probe_tells_the_truth("win", POINTS["float64"])


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("code", "[Reason('Not A Code', 'no')]", "snake_case"),
        ("text", "[Reason('no', ' ')]", "a message"),
        ("raises", "1 // 0", "ZeroDivisionError"),
        ("none", "None", "not a list of Reasons"),
        ("moody", "[Reason('no', str(__import__('time').perf_counter()))]", "answers differently"),
    ],
)
def test_a_bad_probe_is_found(made, name: str, answer: str, said: str) -> None:
    wrong = made(f"bad-probe-{name}", {"probe": ("return reasons", f"return {answer}")})
    with pytest.raises(RED, match=said):
        wrong.test_probe_answers_about_every_device("win")


BEFORE = "groups, tokens, window ="  # first line of attend, before which these put theirs
DENSE = "{0} = {0}.as_strided({0}.shape, torch.empty({0}.shape).stride())"
SHARES = "import time\n    attend.kept = q\n    time.sleep(0.02)\n    q = attend.kept"
RESULT = "return o.to(q.dtype), lse"
UNSOUND = {
    "strided": (BEFORE, f"{DENSE.format('q')}\n    {BEFORE}"),
    "expanded": (BEFORE, f"{DENSE.format('k')}\n    {BEFORE}"),
    "two_threads": (BEFORE, f"{SHARES}\n    {BEFORE}"),
    "grad_modes": (RESULT, "return o.to(q.dtype) + torch.is_inference_mode_enabled(), lse"),
    "operator": (RESULT, f"q.mul_(1.5)\n        {RESULT}"),
}


@pytest.mark.parametrize("check", UNSOUND)
def test_an_unsound_kernel_is_found_by_its_check(made, check: str) -> None:
    wrong = made("unsound-" + check.replace("_", "-"), {"win": UNSOUND[check]})
    # opcheck raises an error of its own; what pytest.fail raises is no Exception.
    with pytest.raises((*RED, Exception), match=f"win, {check}|opcheck"):
        wrong.test_kernel("win", check)


def test_a_kernel_that_writes_to_its_inputs_is_found_by_verify(made) -> None:
    wrong = made(
        "writes",
        {
            "win": (
                "o, lse = attend(q, k, v, call)",
                "o, lse = attend(q, k, v, call)\n        v.mul_(2)",
            )
        },
    )
    with pytest.raises(RED, match="inputs untouched"):
        wrong.test_verify(job("inputs untouched", "S=2w"))


WITHOUT_BACKWARD = ("        backward=", "        workspace=None and ")


def test_forward_only_is_judged_forward_only(made) -> None:
    forward_only = made("forward-only", {"plugin": WITHOUT_BACKWARD})
    forward_only.test_probe_tells_the_truth("win", POINTS["float32"])
    forward_only.test_kernel("win", "operator")
    wrong = made(
        "forward-wrong",
        {"plugin": WITHOUT_BACKWARD, "win": ("distance < window", "distance <= window")},
    )
    with pytest.raises(RED):
        wrong.test_probe_tells_the_truth("win", POINTS["float32"])


def test_what_the_probe_refuses_is_skipped_with_its_reason(made) -> None:
    refuse = (
        "if request.dtype == 'float16':\n        reasons.append(Reason('fp16', 'takes no fp16'))\n "
        "   return reasons"
    )
    picky = made("picky", {"probe": ("return reasons", refuse)})
    picky.test_probe_tells_the_truth("win", POINTS["float32"])
    with pytest.raises(pytest.skip.Exception, match="takes no fp16"):
        picky.test_probe_tells_the_truth("win", POINTS["float16"])
    half = dataclasses.replace(job("parity", "S=1"), dtype=torch.float16)
    with pytest.raises(pytest.skip.Exception, match="takes no fp16"):
        picky.test_verify(half)


def test_unknown_fails_and_unavailable_is_skipped() -> None:
    suite_of = BackendConformance()
    suite_of._device = "cpu"
    suite_of._name = "nonesuch"
    with pytest.raises(pytest.fail.Exception, match="unknown backend 'nonesuch'"):
        suite_of.test_is_installed_and_loads()


def test_the_grid_has_every_edge() -> None:
    lengths = {point.case.lengths for point in GRID}
    assert {(0,), (1,), (7,), (8,), (0, 0)} <= lengths
    assert {point.dtype for point in GRID} == {"bfloat16", "float16", "float32", "float64"}
    assert len({point.label for point in GRID}) == len(GRID)
    assert {case.name for case in quick_cases()} >= {"S=1", "S=2w"}


def test_a_select_that_looks_at_nothing_is_found_wherever_there_are_blocks_to_choose(
    monkeypatch,
) -> None:
    """With as many blocks forced as are asked for, or no more of them than that, any scores would
    do.
    """
    select = pytest.importorskip("nsa_backend_sdpa.select")
    monkeypatch.setattr(select, "head_sums", lambda scores: torch.zeros_like(scores[..., 0, :]))
    subject = SlotUnderTest(default_registry().get("sdpa"), "select")

    def passes(point: Point) -> bool:
        if not subject.ask(point, needs_grad=False).accepted:
            return False
        data, inputs = subject.data(point)
        return not faults("select", point.case, subject.run(point, inputs, None, data), data)

    few = {f"S={length}" for length in (0, 1, 7, 8, 11, 12, 24, 25)} | {"B=0", "packed, no token"}
    assert {point.label for point in GRID if passes(point)} == few | {"n*l'>S", "real block sizes"}
    assert {case.name for case in quick_cases() if passes(Point(case.name, case))} == {
        "S=w",
        "S=2w",
        "S=1",
        "S<l",
    }


def test_a_kernel_whose_bits_change_is_found_where_it_declares_that_they_do_not(made) -> None:
    moody = "return (o * (1 + 2.0**-12 * torch.rand_like(o))).to(q.dtype), lse"
    wrong = made("moody-bits", {"win": (RESULT, moody)})
    wrong.test_probe_tells_the_truth("win", POINTS["bfloat16"])
    with pytest.raises(RED, match="other bits than at the thread's first call"):
        wrong.test_kernel("win", "two_threads")
