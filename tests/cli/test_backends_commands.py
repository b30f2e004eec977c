"""`nsa backends list`, `show` and `explain`: what they say, in words and in JSON, and how they
leave.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch

from nsa_cli import output
from nsa_core.contract import SLOTS, BackendSpec, Reason
from nsa_core.dispatch.registry import BackendEntry, Registry, discover


def of(document: dict, name: str) -> dict:
    return next(row for row in document["backends"] if row["name"] == name)


def test_list_json_has_every_backend_with_what_its_slots_offer(nsa):
    done = nsa("backends", "list", "--json")
    document = json.loads(done.out)
    assert (done.code, done.err, document["schema_version"]) == (0, "", 1)
    sdpa = of(document, "sdpa")
    assert (sdpa["status"], sdpa["distribution"], sdpa["reason"]) == (
        "ready",
        "nsa-backend-sdpa",
        None,
    )
    assert set(sdpa["slots"]) == set(SLOTS)
    for slot, row in sdpa["slots"].items():
        assert (row["forward"], row["backward"], row["decode"]) == (True, slot != "select", True)
        assert row["accepted"]
        assert row["reasons"] == []
    for row in document["backends"]:
        assert row["version"]
        if row["status"] == "ready":
            assert row["reason"] is None
        else:  # its own reason, or where it loaded and every slot refuses, theirs
            said = (
                [row["reason"]]
                if row["reason"]
                else [r for s in row["slots"].values() for r in s["reasons"]]
            )
            assert said
            assert all(reason["message"] for reason in said)
            assert not any(slot["accepted"] for slot in row["slots"].values())


def test_list_text_has_a_line_per_backend(nsa):
    lines = nsa("backends", "list").out.splitlines()
    row = next(line for line in lines if line.startswith("sdpa"))
    assert row.split()[:9] == [
        "sdpa",
        of(json.loads(nsa("backends", "list", "--json").out), "sdpa")["version"],
        "nsa-backend-sdpa",
        "ready",
        *["forward+backward+decode" if slot != "select" else "forward+decode" for slot in SLOTS],
    ]


def test_list_without_probe_reads_metadata_only(nsa, monkeypatch):
    def trap(*args, **options):
        raise AssertionError("a plugin was loaded")

    monkeypatch.setattr("nsa_core.dispatch.registry.load", trap)
    monkeypatch.setenv("NSA_DISABLE_PLUGINS", "fa2")
    document = json.loads(nsa("backends", "list", "--no-probe", "--json").out)
    assert (of(document, "sdpa")["status"], of(document, "sdpa")["slots"]) == ("not loaded", None)
    assert of(document, "fa2")["status"] == "disabled"
    assert "sdpa" in nsa("backends", "list", "--no-probe").out


@pytest.mark.parametrize("options", [(), ("--json",), ("--no-probe", "--json")])
def test_row_60_nothing_runnable_is_exit_4_with_the_reasons(nsa, monkeypatch, options):
    if "--no-probe" in options:
        monkeypatch.setattr("nsa_cli.backend_rows.installed", list)
    else:
        monkeypatch.setenv("NSA_DISABLE_PLUGINS", "sdpa,triton,fa2,1")
    done = nsa("backends", "list", *options)
    assert done.code == 4
    assert done.err.startswith("nsa: no backend can be used")
    assert done.err.count("\n") == 1
    assert "pip install nsa-backend-sdpa" in done.err
    if options:
        assert json.loads(done.out)["schema_version"] == 1
    else:
        assert "named in NSA_DISABLE_PLUGINS" in done.out
    assert nsa("backends", "explain").code == 4 or "--no-probe" in options


def test_show_tells_everything_about_one(nsa):
    out = nsa("backends", "show", "sdpa").out
    for said in (
        "nsa-backend-sdpa",
        "nsa_backend_sdpa.plugin",
        "contract      1.0",
        "ready",
        "combine",
    ):
        assert said in out
    document = json.loads(nsa("backends", "show", "sdpa", "--json").out)
    assert [row["name"] for row in document["backends"]] == ["sdpa"]


def test_show_tells_the_rank_of_the_request_beside_the_stated_priority(nsa, monkeypatch):
    monkeypatch.setattr(
        "nsa_backend_sdpa.probe.rank", lambda request: 40 if request.slot == "cmp" else -3
    )
    done = nsa("backends", "show", "sdpa").out
    rows = {line.split()[0]: line.split() for line in done.splitlines() if line}
    assert rows["slot"][3:6] == ["workspace", "priority", "rank"]
    assert rows["cmp"][4:6] == ["0", "40"]
    assert rows["win"][4:6] == ["0", "-3"]
    assert "rank          counts for this request, in place of the stated priority" in done
    (row,) = json.loads(nsa("backends", "show", "sdpa", "--json").out)["backends"]
    assert [(slot["priority"], slot["rank"]) for slot in row["slots"].values()] == [
        (0, 40),
        *[(0, -3)] * 4,
    ]


def test_show_of_a_backend_without_a_rank_of_its_own_has_no_such_column(nsa):
    done = nsa("backends", "show", "fa2")
    assert "priority" in done.out
    assert "rank" not in done.out
    (row,) = json.loads(nsa("backends", "show", "fa2", "--json").out)["backends"]
    assert {slot["rank"] for slot in row["slots"].values()} == {None}


def test_row_58_show_and_explain_of_an_unknown_name_suggest(nsa):
    for command in (["show", "tritn"], ["explain", "--sel", "tritn"]):
        done = nsa("backends", *command)
        assert (done.code, done.out) == (2, "")
        assert "unknown backend 'tritn'; did you mean 'triton'?" in done.err
        assert done.err.count("\n") == 1


class Toys:
    """Probes of the toy backend; the registry below names them."""

    @staticmethod
    def picky(request):
        if request.needs_grad or request.head_dim > 64:
            return [
                Reason("wide", f"head width {request.head_dim} > 64", "use sdpa"),
                Reason("two", "[red]and[/] more"),
            ]
        return []


@pytest.fixture
def toy(monkeypatch):
    """`picky` beside sdpa: preferred, but takes narrow heads and no gradients."""
    monkeypatch.setitem(sys.modules, "picky_toy", Toys)
    sdpa = discover().get("sdpa").spec
    spec: BackendSpec = dataclasses.replace(
        sdpa, name="picky", probe="picky_toy:picky", priority=50
    )
    registry = discover().with_backend(spec, version="9.9")
    monkeypatch.setattr(output, "find_backends", lambda: registry)
    return registry


def test_explain_accepts_and_marks_the_chosen_one(nsa, toy):
    done = nsa("backends", "explain", "--sel", "sdpa", "--json")
    document = json.loads(done.out)
    assert (done.code, document["error"], document["schema_version"]) == (0, None, 1)
    slots = document["slots"]
    assert {slot: row["chosen"] for slot, row in slots.items()} == {
        **dict.fromkeys(SLOTS, "picky"),
        "sel": "sdpa",
    }
    assert (slots["sel"]["asked"], slots["cmp"]["asked"]) == ("sdpa", None)
    lines = nsa("backends", "explain", "--sel", "sdpa").out.splitlines()
    marked = [line.split()[:4] for line in lines if "*" in line]
    assert [row[:3] for row in marked] == [
        [slot, "*", "sdpa" if slot == "sel" else "picky"] for slot in SLOTS
    ]


def test_explain_refusal_prints_every_reason_and_hint_and_leaves_with_3(nsa, toy):
    options = ("backends", "explain", "--win", "picky", "--head-dim", "128", "--grad")
    done = nsa(*options)
    assert done.code == 3
    assert done.err == "nsa: 'picky' cannot run win\n"
    for said in ("head width 128 > 64", "use sdpa", "[red]and[/] more", "gradients"):
        assert said in done.out
    done = nsa(*options, "--json")
    document = json.loads(done.out)
    assert (done.code, document["error"]["kind"]) == (3, "Unsupported")
    picky = next(c for c in document["slots"]["win"]["candidates"] if c["backend"] == "picky")
    assert [reason["code"] for reason in picky["reasons"]] == ["wide", "two"]
    assert picky["reasons"][0]["hint"] == "use sdpa"
    assert not picky["accepted"]


def test_explain_known_but_unavailable_is_exit_3(nsa, monkeypatch):
    reason = Reason("not_implemented", "kernels not implemented yet", "use sdpa")
    absent = BackendEntry(
        "absent", "nsa-absent", "1.0", "unavailable", reason, None, "absent", False
    )
    registry = Registry((*discover().entries, absent))
    monkeypatch.setattr(output, "find_backends", lambda: registry)
    done = nsa("backends", "explain", "--cmp", "absent", "--device", "cpu")
    assert (done.code, done.err) == (3, "nsa: 'absent' cannot run cmp\n")
    for command in (("explain", "--device", "cpu"), ("list",), ("show", "absent")):
        done = nsa("backends", *command)
        assert done.code == 0
        assert "kernels not implemented yet" in done.out
        assert "use sdpa" in done.out


def test_explain_passes_every_option_on(nsa, toy):
    done = nsa(
        "backends",
        "explain",
        "--dtype",
        "bfloat16",
        "--head-dim",
        "6",
        "--v-head-dim",
        "10",
        "--n-heads",
        "8",
        "--n-kv-heads",
        "4",
        "--device",
        "cpu",
        "--batch",
        "3",
        "--seq-len",
        "77",
        "--grad",
        "--varlen",
        "--deterministic",
        "--json",
    )
    request = json.loads(done.out)["request"]
    expected = {
        "n_heads": 8,
        "n_kv_heads": 4,
        "head_dim": 6,
        "v_head_dim": 10,
        "dtype": "bfloat16",
        "device": "cpu",
        "batch": 3,
        "seq_len": 77,
        "needs_grad": True,
        "varlen": True,
        "deterministic": True,
        "phase": "prefill",
    }
    assert {name: request[name] for name in expected} == expected
    assert nsa("backends", "explain", "--phase", "decode", "--sel", "fa2").code == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dtype", "int8"], "dtype must be one of"),
        (["--n-heads", "13", "--n-kv-heads", "4"], "13 query heads do not divide over 4"),
        (["--head-dim", "0"], "head_dim must be an integer >= 1, got 0"),
        (["--phase", "dcode"], "phase must be one of prefill, decode"),
        (["--device", "gpu"], "device 'gpu'"),
        (["--head-dim", "x"], "--head-dim"),
        (["--nonsense"], "nonsense"),
    ],
)
def test_impossible_requests_are_one_line_and_exit_2(nsa, options, said):
    done = nsa("backends", "explain", *options)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert done.err.count("\n") == 1


def test_device_that_is_not_there_is_exit_3(nsa, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = nsa("backends", "explain", "--device", "cuda")
    assert done.code == 3
    assert "device 'cuda' cannot be used: torch" in done.err


def test_safe_mode_reaches_the_registry(nsa, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "nsa_core.dispatch.registry.discover", lambda **options: asked.append(options) or Registry()
    )
    nsa("--safe", "--plugin-limit", "3", "backends", "list")
    nsa("backends", "list")
    assert asked == [
        {"isolate": True, "safe": True, "limit_s": 3.0},
        {"isolate": True, "safe": False, "limit_s": 20.0},
    ]


@pytest.mark.parametrize("command", [["list"], ["show", "picky"], ["explain", "--head-dim", "128"]])
def test_piped_output_is_not_cut_wrapped_or_coloured(nsa, toy, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = nsa("backends", *command).out
    assert "\x1b" not in out
    assert "…" not in out
    assert max(map(len, out.splitlines())) > 80


def test_list_and_show_of_decode(nsa):
    document = json.loads(nsa("backends", "list", "--phase", "decode", "--json").out)
    assert document["request"].endswith("decode")
    assert all(slot["accepted"] for slot in of(document, "sdpa")["slots"].values())
    fa2 = of(document, "fa2")["slots"]
    assert {slot: row["decode"] for slot, row in fa2.items() if row["forward"]} == {
        "cmp": True,
        "sel": False,
        "win": False,
    }
    assert "no_decode" in [reason["code"] for reason in fa2["win"]["reasons"]]
    assert "a ring holds them turned" in nsa(
        "backends", "show", "fa2", "--phase", "decode"
    ).out.replace("\n", " ")
    assert nsa("backends", "list", "--phase", "decoding").code == 2


def test_explain_of_decode_with_pages(nsa):
    done = nsa("backends", "explain", "--phase", "decode", "--page-size", "128", "--json")
    document = json.loads(done.out)
    assert document["request"]["page_size"] == 128
    assert document["request"]["summary"].endswith("decode, pages of 128 tokens")
    assert {row["chosen"] for row in document["slots"].values()} == {"sdpa"}
    assert nsa("backends", "explain", "--phase", "decode", "--page-size", "100").code == 2


def test_conformance_without_pytest_says_what_to_type(nsa, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest", None)
    done = nsa("conformance", "sdpa", "--device", "cpu")
    reason = "nsa conformance needs pytest, which is not installed"
    said = f"nsa: {reason}; pip install 'nsa-verify[test]'\n"
    assert (done.code, done.out, done.err) == (3, "", said)
