"""`nsa backends list`, `show` and `explain`: text output, JSON and exit codes."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from nsa_cli import output
from nsa_core.contract import FUSED_DECODE, SLOTS, BackendSpec, Reason, SlotSpec
from nsa_core.plan.loading import BackendEntry
from nsa_core.plan.registry import Registry, discover


def row_of(document: dict, name: str) -> dict:
    return next(row for row in document["backends"] if row["name"] == name)


def test_list_json_has_every_backend_with_its_slots(nsa):
    done = nsa("backends", "list", "--json")
    document = json.loads(done.out)
    assert (done.code, done.err, document["schema_version"]) == (0, "", 1)
    sdpa = row_of(document, "sdpa")
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
        else:  # the backend has a reason, or each of its slots has one
            reasons = (
                [row["reason"]]
                if row["reason"]
                else [reason for slot in row["slots"].values() for reason in slot["reasons"]]
            )
            assert reasons
            assert all(reason["message"] for reason in reasons)
            assert not any(slot["accepted"] for slot in row["slots"].values())


def test_list_text_has_a_line_per_backend(nsa):
    lines = nsa("backends", "list").out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines}
    version = row_of(json.loads(nsa("backends", "list", "--json").out), "sdpa")["version"]
    assert rows["name"] == ["name", "version", "status", *SLOTS]
    marks = ["✓D" if slot != "select" else "FD" for slot in SLOTS]
    assert rows["sdpa"] == ["sdpa", version, "ready", *marks]
    assert rows["fa2"][2:] == ["unavailable", "(✓D)", "-", "(✓)", "(✓)", "-"]
    assert "fa2, triton: needs cuda, got cpu" in lines
    assert "hint" not in " ".join(lines)
    assert [line for line in lines if "no CUDA GPU" in line] == [
        "no CUDA GPU is usable: the answers are for the CPU; --gpu a100 simulates one"
    ]


def test_list_without_probe_reads_metadata_only(nsa, monkeypatch):
    def fail(*args, **options):
        raise AssertionError("a plugin was loaded")

    monkeypatch.setattr("nsa_core.plan.registry.load", fail)
    monkeypatch.setenv("NSA_DISABLE_PLUGINS", "fa2")
    document = json.loads(nsa("backends", "list", "--no-probe", "--json").out)
    assert (row_of(document, "sdpa")["status"], row_of(document, "sdpa")["slots"]) == (
        "not loaded",
        None,
    )
    assert row_of(document, "fa2")["status"] == "disabled"
    assert "sdpa" in nsa("backends", "list", "--no-probe").out


@pytest.mark.parametrize("options", [(), ("--json",), ("--no-probe", "--json")])
def test_row_60_no_usable_backend_exits_with_code_4_and_reasons(nsa, monkeypatch, options):
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


def test_show_prints_all_details_of_one_backend(nsa):
    out = nsa("backends", "show", "sdpa").out
    for text in (
        "nsa-backend-sdpa",
        "nsa_backend_sdpa.plugin",
        "contract      1.1",
        "ready",
        "combine",
    ):
        assert text in out
    document = json.loads(nsa("backends", "show", "sdpa", "--json").out)
    assert [row["name"] for row in document["backends"]] == ["sdpa"]


def test_show_prints_the_rank_beside_the_stated_priority(nsa, monkeypatch):
    monkeypatch.setattr(
        "nsa_backend_sdpa.probe.rank", lambda request: 40 if request.slot == "cmp" else -3
    )
    done = nsa("backends", "show", "sdpa").out
    rows = {line.split()[0]: line.split() for line in done.splitlines() if line}
    assert rows["slot"][3:6] == ["workspace", "priority", "rank"]
    assert rows["cmp"][4:6] == ["0", "40"]
    assert rows["win"][4:6] == ["0", "-3"]
    assert "rank: replaces the stated priority for this request" in done
    (row,) = json.loads(nsa("backends", "show", "sdpa", "--json").out)["backends"]
    assert [(slot["priority"], slot["rank"]) for slot in row["slots"].values()] == [
        (0, 40),
        *[(0, -3)] * 4,
    ]


def test_show_has_no_rank_column_for_a_backend_without_a_rank(nsa):
    done = nsa("backends", "show", "fa2")
    assert "priority" in done.out
    assert "rank" not in done.out
    (row,) = json.loads(nsa("backends", "show", "fa2", "--json").out)["backends"]
    assert {slot["rank"] for slot in row["slots"].values()} == {None}


class ToyProbes:
    """The module of the toy backend's probe; the registry below names it."""

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
    """A registry with sdpa and `picky`, which has priority but refuses wide heads and gradients."""
    monkeypatch.setitem(sys.modules, "picky_toy", ToyProbes)
    sdpa = discover().get("sdpa").spec
    spec: BackendSpec = dataclasses.replace(
        sdpa, name="picky", probe="picky_toy:picky", priority=50
    )
    registry = discover().with_backend(spec, version="9.9")
    monkeypatch.setattr(output, "find_backends", lambda: registry)
    return registry


def test_explain_marks_the_chosen_backend_of_each_slot(nsa, toy):
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
    table = [line.split(maxsplit=3) for line in lines[2 : 3 + len(SLOTS)]]
    assert table == [
        ["slot", "runs", "on", "because"],
        *(
            [slot, "sdpa", "0.1.0", "chosen by name"]
            if slot == "sel"
            else [slot, "picky", "9.9", "highest rank"]
            for slot in SLOTS
        ),
    ]
    assert "no measurement of nsa tune is used: the order is the built-in one" in lines


def test_explain_prints_every_reason_and_exits_with_code_3(nsa, toy):
    options = ("backends", "explain", "--win", "picky", "--head-dim", "128", "--grad")
    done = nsa(*options)
    assert done.code == 3
    assert done.err == "nsa: 'picky' cannot run win\n"
    for text in ("head width 128 > 64", "use sdpa", "[red]and[/] more", "gradients"):
        assert text in done.out
    done = nsa(*options, "--json")
    document = json.loads(done.out)
    assert (done.code, document["error"]["kind"]) == (3, "Unsupported")
    picky = next(c for c in document["slots"]["win"]["candidates"] if c["backend"] == "picky")
    assert [reason["code"] for reason in picky["reasons"]] == ["wide", "two"]
    assert picky["reasons"][0]["hint"] == "use sdpa"
    assert not picky["accepted"]


def test_explain_says_why_the_kernel_of_a_named_backend_does_not_load(nsa, toy, monkeypatch):
    slots = {"win": SlotSpec("no_such_module:forward")}
    spec = BackendSpec("lost", (1, 0), slots, "picky_toy:picky")
    lost = BackendEntry("lost", "nsa-lost", "1.0", "lost", "ready", spec=spec)
    monkeypatch.setattr(output, "find_backends", lambda: Registry((*discover().entries, lost)))
    done = nsa("backends", "explain", "--win", "lost", "--device", "cpu")
    assert (done.code, done.err) == (3, "nsa: 'lost' cannot run win\n")
    in_win = done.out.partition("candidates for win")[2]
    assert "lost 1.0: not supported\n    - its kernel does not load: ModuleNotFound" in in_win
    assert "lost 1.0: accepted" not in in_win


def test_list_names_two_backends_of_one_name_once(nsa, monkeypatch):
    reason = Reason("name_conflict", "the name 'twin' is claimed by one and two", "uninstall one")
    twins = [BackendEntry("twin", name, "1.0", name, "broken", reason) for name in ("one", "two")]
    registry = Registry((*discover().entries, *twins))
    monkeypatch.setattr(output, "find_backends", lambda: registry)
    assert "\ntwin: the name 'twin' is claimed by" in nsa("backends", "list").out


def test_explain_exits_with_code_3_for_an_unavailable_backend(nsa, monkeypatch):
    reason = Reason("not_implemented", "kernels not implemented yet", "use sdpa")
    absent = BackendEntry("absent", "nsa-absent", "1.0", "absent", "unavailable", reason)
    registry = Registry((*discover().entries, absent))
    monkeypatch.setattr(output, "find_backends", lambda: registry)
    done = nsa("backends", "explain", "--cmp", "absent", "--device", "cpu")
    assert (done.code, done.err) == (3, "nsa: 'absent' cannot run cmp\n")
    for command in (("explain", "--device", "cpu"), ("list",), ("show", "absent")):
        done = nsa("backends", *command)
        assert done.code == 0
        assert "kernels not implemented yet" in done.out
        assert ("use sdpa" in done.out) == (command[0] != "list")


def test_explain_passes_every_option_to_the_request(nsa, toy):
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


def test_safe_mode_reaches_the_registry(nsa, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "nsa_core.plan.registry.discover", lambda **options: calls.append(options) or Registry()
    )
    nsa("--safe", "--plugin-limit", "3", "backends", "list")
    nsa("backends", "list")
    assert calls == [
        {"isolate": True, "safe": True, "limit_s": 3.0},
        {"isolate": True, "safe": False, "limit_s": 10.0},
    ]


@pytest.mark.parametrize("command", [["show", "picky"], ["explain", "--head-dim", "128"]])
def test_piped_output_is_not_truncated_wrapped_or_coloured(nsa, toy, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = nsa("backends", *command).out
    assert "\x1b" not in out
    assert "…" not in out
    assert max(map(len, out.splitlines())) > 80


def test_list_and_show_with_phase_decode(nsa):
    document = json.loads(nsa("backends", "list", "--phase", "decode", "--json").out)
    assert document["request"].endswith("decode")
    assert all(slot["accepted"] for slot in row_of(document, "sdpa")["slots"].values())
    fa2 = row_of(document, "fa2")["slots"]
    assert {slot: row["decode"] for slot, row in fa2.items() if row["forward"]} == {
        "cmp": True,
        "sel": False,
        "win": False,
    }
    assert "no_decode" in [reason["code"] for reason in fa2["win"]["reasons"]]
    assert "a ring holds them turned" in nsa(
        "backends", "show", "fa2", "--phase", "decode"
    ).out.replace("\n", " ")


def test_explain_with_phase_decode_and_pages(nsa):
    done = nsa("backends", "explain", "--phase", "decode", "--page-size", "128", "--json")
    document = json.loads(done.out)
    assert document["request"]["page_size"] == 128
    assert document["request"]["summary"].endswith("decode, pages of 128 tokens")
    assert {row["chosen"] for row in document["slots"].values()} == {"sdpa"}
    quantized = nsa("backends", "explain", "--phase", "decode", "--kv-dtype", "int8", "--json")
    document = json.loads(quantized.out)
    assert document["request"]["kv_dtype"] == "int8"
    assert {row["chosen"] for row in document["slots"].values()} == {"sdpa"}


def test_gpu_option_answers_for_another_machine(nsa):
    document = json.loads(nsa("backends", "list", "--gpu", "a100", "--json").out)
    assert document["simulated"]["title"] == "A100 (sm_80)"
    assert document["request"].endswith("bfloat16 on cuda sm_80, prefill")
    assert row_of(document, "sdpa")["status"] == "ready"
    for command in (("list",), ("show", "sdpa"), ("explain",)):
        out = nsa("backends", *command, "--gpu", "SM_75").out
        assert "simulated: sm_75, not this machine" in out
        assert "no CUDA GPU" not in out
        assert "simulated: " not in nsa("backends", *command).out
    t4 = json.loads(nsa("backends", "explain", "--gpu", "t4", "--json").out)
    assert (t4["request"]["dtype"], t4["request"]["capability"]) == ("bfloat16", [7, 5])
    assert {row["chosen"] for row in t4["slots"].values()} == {"sdpa"}


def test_gpu_option_runs_triton_on_an_a100(nsa):
    pytest.importorskip("triton")
    a100 = json.loads(nsa("backends", "explain", "--gpu", "a100", "--json").out)
    assert {row["chosen"] for row in a100["slots"].values()} == {"triton"}
    assert nsa("backends", "explain", "--gpu", "a100").code == 0
    assert nsa("backends", "explain", "--gpu", "t4", "--sel", "triton").code == 3


@pytest.mark.few_cases("options4-None-fused4")
@pytest.mark.parametrize(
    ("options", "causal", "fused"),
    [
        ([], True, {}),
        (["--grad"], False, dict.fromkeys(["backward"], "triton")),
        (["--phase", "decode"], False, dict.fromkeys(FUSED_DECODE, "triton")),
        (["--win", "sdpa"], True, {}),
        (["--sel", "fa2", "--dtype", "float32"], None, {}),
    ],
)
def test_explain_shows_causal_attention_and_fused_forms_as_the_plan_does(
    nsa, options, causal, fused
):
    """``causal`` is None if there is no plan, because the named backend refuses the request."""
    pytest.importorskip("triton")
    command = ["backends", "explain", "--gpu", "a100", *options]
    document = json.loads(nsa(*command, "--json").out)
    assert (document["error"] is not None) == (causal is None)
    assert document["causal_up_to"] == (1024 if causal else None)
    assert document["fused"] == fused
    lines = nsa(*command).out.splitlines()
    note = "sel, up to n l' = 1024 tokens: causal attention by the backend of win, without select"
    assert lines.count(note) == bool(causal)
    rows = [line.split() for line in lines if line.endswith("fused form")]
    assert rows == [[name, "triton", "fused", "form"] for name in fused]


@pytest.mark.slow
def test_gpu_option_assumes_a_full_installation(nsa, monkeypatch):
    reason = Reason("absent", "the package x is not installed", "pip install x")

    class Probes:
        @staticmethod
        def probe(request):
            old = request.device == "cuda" and request.capability < (9, 0)
            return [*[Reason("old", "needs sm_90")] * old, reason]

    monkeypatch.setitem(sys.modules, "absent_toy", Probes)
    sdpa = discover().get("sdpa").spec
    # Its kernels cannot be imported without the package.
    slots = {
        slot: dataclasses.replace(own, forward="absent_x:f", backward=own.backward and "absent_x:b")
        for slot, own in sdpa.slots.items()
    }
    spec = dataclasses.replace(
        sdpa, name="absent", probe="absent_toy:probe", rank=None, slots=slots, priority=99
    )
    registry = discover().with_backend(spec, version="9.9")
    monkeypatch.setattr(output, "find_backends", lambda: registry)
    document = json.loads(nsa("backends", "explain", "--gpu", "h100", "--json").out)
    assert {slot["chosen"] for slot in document["slots"].values()} == {"absent"}
    assert document["causal_up_to"] == 1024
    lacking = "missing here, for absent: the package x is not installed"
    document = json.loads(nsa("backends", "list", "--gpu", "h100", "--json").out)
    assert row_of(document, "absent")["status"] == "ready"
    assert document["simulated"]["assumed"]["absent"] == "the package x is not installed"
    for command in (("list",), ("show", "absent"), ("explain",)):
        out = nsa("backends", *command, "--gpu", "a100").out
        assert out.count(lacking) == out.count("the package x is not installed") == 1
        assert "needs sm_90" in out
        assert "missing here" not in nsa("backends", *command).out


def test_explain_lists_slots_with_the_same_candidates_together(nsa, toy):
    out = nsa("backends", "explain", "--device", "cpu", "--head-dim", "128").out
    assert [line for line in out.splitlines() if line.startswith("candidates")] == [
        "candidates for cmp, sel, win, in the order of auto",
        "candidates for select, combine, in the order of auto",
    ]
    assert out.count("  picky 9.9: unavailable\n    - head width 128 > 64\n") == 2
    assert out.count("refused") == 0  # picky accepts no slot, so that it is unavailable
