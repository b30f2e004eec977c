"""The hint of a plugin that fails: report it to this project or to the plugin's author."""

from __future__ import annotations

import dataclasses

import pytest

from nsa_core.plan.candidates import find_candidates
from nsa_core.plan.loading import Plugin, load
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.registry import Registry
from planning import CONFIG, spec

OURS = "this is a bug in NSA itself: please report it with the output of `nsa doctor --report`"
AUTHOR = "report it to the plugin's author"
SOURCES = {
    "load_failed": "raise RuntimeError('boo')",
    "registers_nothing": "x = 1",
    "bad_spec": (
        "from nsa_core.contract import hookimpl\n@hookimpl\ndef nsa_register_backends(): return 3"
    ),
}


@pytest.mark.parametrize(
    ("distribution", "hint"),
    [
        ("nsa-backend-sdpa", OURS),
        ("nsa_backend_triton", OURS),
        ("nsa-backend-fa2", OURS),
        ("nsa-backend-mine", AUTHOR),
    ],
)
def test_the_hint_names_who_should_get_the_report(distribution, hint):
    assert Plugin("toy", distribution, "1", "module").report_hint == hint


@pytest.mark.parametrize("code", SOURCES)
def test_a_failed_load_has_the_hint(code, tmp_path, monkeypatch):
    (tmp_path / f"fault_{code}.py").write_text(SOURCES[code])
    monkeypatch.syspath_prepend(str(tmp_path))
    (entry,) = load(Plugin("toy", "toy", "1", f"fault_{code}"))
    assert entry.reason is not None
    assert (entry.reason.code, entry.reason.hint) == (code, AUTHOR)


@pytest.mark.parametrize(("distribution", "hint"), [("nsa-backend-sdpa", OURS), ("toy", AUTHOR)])
def test_a_faulty_probe_rank_or_spec_has_the_hint(distribution, hint, toy):
    toy.raises, toy.nonsense, toy.words = (lambda r: 1 // 0), (lambda r: 3), (lambda r: "first")
    specs = [spec(probe, probe) for probe in ("raises", "nonsense")]
    specs += [spec("rank-raises", rank="planned:raises"), spec("rank-words", rank="planned:words")]
    specs += [dataclasses.replace(spec("bad"), slots={})]
    registry = Registry()
    for backend_spec in specs:
        registry = registry.with_backend(backend_spec, distribution=distribution)
    candidates = find_candidates(CONFIG, PlanOptions(), registry=registry).by_slot["win"]
    hints = [reason.hint for candidate in candidates for reason in candidate.reasons]
    assert hints == [hint] * len(specs)
