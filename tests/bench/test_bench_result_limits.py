"""Result files of strangers: each value beyond reason is refused by its name, or shown as text."""

from __future__ import annotations

import copy
import json
import re
import unicodedata
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nsa_bench.compare import compare
from nsa_bench.result import LARGEST, read_result
from nsa_core.errors import InvalidInput

RESULTS = Path(__file__).with_name("data")  # published files change with every measurement
FILE = RESULTS / "backends_12_2_64.json"
TOKENS = 2**31 - 1
NASTY = "\x1b[31m[bold]x[/]\x07\r\n\u202e\ud800</title><script>$\\frac{"
DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
HOSTILE = (
    *(NASTY, "", "x" * 100_000, DEEP, None, True, [], {}, [[]], {NASTY: NASTY}, [NASTY]),
    *(0, -1, 1, 10**9, 10**400, -(10**400), 0.0, -1.5, 5e-324, 1e308, 2.5),
)
# Python writes no such numbers; they stand in the text of a file.
LITERALS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000)
MISSING = object()


def shortened(name: str, **wanted: tuple[object, ...]) -> dict[str, Any]:
    """Return a stored result with few measurements, so that it is read and drawn soon."""
    document: dict[str, Any] = json.loads((RESULTS / name).read_text())
    document["measurements"] = [
        m for m in document["measurements"] if all(m[key] in wanted[key] for key in wanted)
    ]
    for values in (document["gates"], document["crossovers"]):
        del values[1:]
    for m in document["measurements"]:
        del m["performance"]["samples_ms"][5:]
    del document["environment"]["source_trees"]
    return document


PREFILL = shortened(
    "backends_12_2_64.json",
    subject=("auto", "dense cudnn"),
    inputs=("random",),
    phase=("forward",),
    length=(2048, 8192),
)
PREFILL["gates"][0]["failures"] = ["o: too large"]
PREFILL["skipped"] = {"fla": "not installed"}
PREFILL["interrupted"] = {"signal": "SIGINT", "cells_left": 1, "cells": 2}
DECODE = shortened("decode.json", shape=("8/2/32",), length=(2048,))


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in a tree."""
    yield place
    items = enumerate(value) if isinstance(value, list) else ()
    for name, item in value.items() if isinstance(value, dict) else items:
        yield from places(item, (*place, name))


DOCUMENTS = {"prefill": PREFILL, "decode": DECODE}
PLACES = [(name, place) for name, document in DOCUMENTS.items() for place in places(document)]


def replaced(document: dict[str, Any], place: tuple[Any, ...], value: Any) -> str:
    """Return the JSON text of ``document`` with another value at ``place``, or without it."""
    if not place:
        changed = value
    else:
        changed = copy.deepcopy(document)
        holder = changed
        for name in place[:-1]:
            holder = holder[name]
        if value is MISSING:
            del holder[place[-1]]
        elif isinstance(value, str) and value in LITERALS:
            holder[place[-1]] = "the literal"
        else:
            holder[place[-1]] = value
    return json.dumps(changed, default=lambda _: "").replace('"the literal"', str(value))


def check_plain(text: str) -> None:
    """Check that a text has no control characters other than line breaks."""
    bad = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n"}
    assert not bad


def check_command(done: Any) -> None:
    """Check the exit code of a command, and that it printed plain text and finite numbers."""
    assert done.code in (0, 1, 2, 5), done.err
    assert "Traceback" not in done.err
    assert (done.code == 2) == done.err.startswith("nsa: ")
    check_plain(done.out)
    check_plain(done.err)
    assert not re.search(r"\b(nan|inf)\b", done.out)


def files_of(folder: Path, name: str, place: tuple[Any, ...], value: Any) -> tuple[str, str]:
    """Write a result with another value at ``place``, and the result itself."""
    hostile, sound = folder / "hostile.json", folder / "sound.json"
    hostile.write_text(replaced(DOCUMENTS[name], place, value))
    sound.write_text(json.dumps(DOCUMENTS[name]))
    return str(hostile), str(sound)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("prefill", ("environment", "device"), NASTY.replace("\n", "")),
        ("prefill", ("measurements", 0, "subject"), NASTY.replace("\n", "")),
        ("prefill", ("measurements", 0, "reason"), NASTY),
        ("prefill", ("measurements",), []),
        ("prefill", ("measurements", 0, "length"), 0),
        ("prefill", ("measurements", 0, "performance", "median_ms"), "1e999"),
        ("prefill", ("peaks", "bfloat16", "flops_per_s"), 0),
        ("prefill", ("settings", "methods"), [[]]),
        ("prefill", ("settings", "inputs"), 1),
        ("prefill", ("environment", "cpus"), DEEP),
        ("prefill", ("schema_version",), 10**400),
        ("decode", ("measurements", 0, "performance", "samples_ms"), []),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_hostile_value_gives_a_sentence_or_plain_text(nsa, tmp_path, name, place, value):
    hostile, sound = files_of(tmp_path, name, place, value)
    check_command(nsa("bench", "report", hostile))
    check_command(nsa("bench", "compare", hostile, sound))
    check_command(nsa("bench", "compare", sound, hostile, "--force"))


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.sampled_from(PLACES), st.sampled_from((*HOSTILE, *LITERALS, MISSING)))
@example(("prefill", ("measurements", 0, "kind")), "another")
@example(("prefill", ("measurements", 0, "subject")), NASTY.replace("\n", ""))
@example(("prefill", ("measurements", 0, "parts")), {"another": None})
@example(("decode", ("measurements", 0, "floor_ms")), 0.0)
@example(("decode", ("measurements", 0, "subject")), "x" * 190)
def test_any_hostile_value_gives_a_sentence_or_a_plain_page(nsa, tmp_path, where, value):
    hostile, sound = files_of(tmp_path, *where, value)
    page, plot = tmp_path / "page.html", tmp_path / "plot.svg"
    done = nsa("bench", "report", hostile, "--html", str(page), "--svg", str(plot), "--force")
    check_command(done)
    check_command(nsa("bench", "compare", hostile, sound, "--force"))
    if done.code == 2:
        return
    text = page.read_text(encoding="utf-8")
    check_plain(text)
    assert "<script" not in text
    for svg in (plot.read_text(encoding="utf-8"), *re.findall("<svg.*?</svg>", text)):
        xml.etree.ElementTree.fromstring(svg)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "is not a result of nsa bench"),
        ("[" * 100_000, "is not JSON"),
        ('{"kind": "nsa-bench", "schema_version": "\\u001b"}', r"has schema_version '\x1b'"),
        ('{"kind": "nsa-bench", "schema_version": NaN}', "is not JSON"),
        ('{"kind": "nsa-bench", "schema_version": 1}', "lacks settings"),
        (None, "give a file"),
    ],
    ids=["empty", "half", "list", "deep", "version", "NaN", "no settings", "missing"],
)
def test_row_60_a_file_that_is_no_result_is_refused_in_a_sentence(nsa, tmp_path, text, message):
    file = tmp_path / "result.json"
    if text is not None:
        file.write_text(text)
    done = nsa("bench", "report", str(file))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert message in done.err


def test_an_endless_file_is_refused(nsa, monkeypatch):
    monkeypatch.setattr("nsa_cli.choices._LARGEST_FILE", 1 << 20)
    for words in (["bench", "report"], ["inspect", "--out", "i", "--text"]):
        done = nsa(*words, "/dev/zero")
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert re.search(r"/dev/zero has more than (64|1) MiB; give a shorter file", done.err)


@pytest.mark.parametrize(
    ("section", "field", "limit"),
    [
        ("measurements", "length", TOKENS),
        ("measurements", "batch", TOKENS),
        ("measurements", "flops", LARGEST),
        ("measurements", "peak_memory_bytes", LARGEST),
        ("crossovers", "length", TOKENS),
    ],
)
def test_a_number_out_of_range_is_refused(
    tmp_path: Path, section: str, field: str, limit: int
) -> None:
    document = json.loads(FILE.read_text())
    path = tmp_path / "result.json"
    entry = document[section][0]
    allowed = f"must be from {int(limit == TOKENS)} to {limit}"
    for value, words in (
        (limit, None),
        (limit + 1, f"{allowed}, got {limit + 1}"),
        (10**400, f"{allowed}, got about 1e400"),
        (-1, f"{allowed}, got -1"),
        (1e9, "must be int"),
        (True, "must be int"),
    ):
        entry[field] = value
        path.write_text(json.dumps(document))
        if words is None:
            read_result(path)
            continue
        with pytest.raises(InvalidInput) as caught:
            read_result(path)
        assert f"{section}[0].{field} {words}" in str(caught.value)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            ("measurements", 0, "floor_ms"),
            10**400,
            r"measurements\[0\].floor_ms must be from .* about 1e400",
        ),
        (("measurements", 0, "performance", "median_ms"), -1.0, "median_ms must be from 1e-12"),
        (("measurements", 0, "performance", "samples_ms", 2), 0, r"samples_ms\[2\] must be from"),
        (("measurements", 0, "ratio_to_dense"), 0.0, "ratio_to_dense must be from 1e-12"),
        (
            ("measurements", 0, "subject"),
            "x" * 201,
            "subject must have at most 200 characters on one",
        ),
        (("environment", "device"), "x\ny", "environment.device must have .* on one line"),
        (("environment", "cpus"), DEEP, "nested more than 20 levels deep"),
        (("settings", "threads"), "many", "settings.threads must be int, got 'many'"),
        (("settings", "threads"), MISSING, "settings lacks threads"),
        (("settings", "text_name"), "x" * 10_001, "text_name must have at most 10000 characters"),
        (("peaks", "bfloat16"), MISSING, "peaks has no rates of bfloat16"),
        (
            ("measurements", 0, "kind"),
            "x",
            "kind must be one of combo, dense, layer, rival, got 'x'",
        ),
        (("measurements", 0, "parts", "x"), None, r"parts.x must be an object, got None"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_value_that_no_run_writes_is_refused_by_its_place(tmp_path, place, value, message):
    path = tmp_path / "result.json"
    path.write_text(replaced(PREFILL, place, value))
    with pytest.raises(InvalidInput, match=message):
        read_result(path)


def test_a_part_may_have_the_negative_difference_of_two_times(nsa, tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    index = next(i for i, m in enumerate(PREFILL["measurements"]) if "cmp" in m["parts"])
    place = ("measurements", index, "parts", "cmp", "performance", "median_ms")
    old.write_text(json.dumps(PREFILL))
    new.write_text(replaced(PREFILL, place, -0.001))
    assert nsa("bench", "report", str(new)).code == nsa("bench", "report", str(old)).code
    for pair in ((old, new), (new, old)):
        changes = compare(*map(read_result, pair), fail_over=0.05)
        odd = [c for c in changes if -0.001 in (c.old_ms, c.new_ms)]
        assert [(c.ratio, c.verdict, c.note) for c in odd] == [
            (None, "same", "too short to compare")
        ]
