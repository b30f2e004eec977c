"""Faults at load time: a backend of this project is reported to this project, another one to its
author.
"""

from __future__ import annotations

import pytest

from nsa_core.dispatch.loading import Plugin, load

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
def test_who_is_told_of_a_plugin_that_does_not_load(
    code, distribution, words, tmp_path, monkeypatch
):
    module = f"fault_{code}_{len(distribution)}"
    (tmp_path / f"{module}.py").write_text(SOURCES[code])
    monkeypatch.syspath_prepend(str(tmp_path))
    (entry,) = load(Plugin("toy", distribution, "1", module))
    assert entry.reason is not None
    assert entry.reason.code == code
    assert words in entry.reason.hint
