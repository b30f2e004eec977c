"""The hint of a plugin that fails to load: report it to this project or to the plugin's author."""

from __future__ import annotations

import pytest

from nsa_core.plan.loading import Plugin, load

SOURCES = {
    "load_failed": "raise RuntimeError('boo')",
    "registers_nothing": "x = 1",
    "bad_spec": (
        "from nsa_core.contract import hookimpl\n@hookimpl\ndef nsa_register_backends(): return 3"
    ),
}


@pytest.mark.parametrize("code", SOURCES)
@pytest.mark.parametrize(
    ("distribution", "words"), [("nsa-backend-triton", "bug in NSA"), ("toy", "plugin's author")]
)
def test_hint_of_a_failed_load_names_who_should_get_the_report(
    code, distribution, words, tmp_path, monkeypatch
):
    module = f"fault_{code}_{len(distribution)}"
    (tmp_path / f"{module}.py").write_text(SOURCES[code])
    monkeypatch.syspath_prepend(str(tmp_path))
    (entry,) = load(Plugin("toy", distribution, "1", module))
    assert entry.reason is not None
    assert entry.reason.code == code
    assert words in entry.reason.hint
