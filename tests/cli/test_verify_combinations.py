"""`nsa verify --every-combination`, and the dtype in which it plans a combination."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from nsa_backend_fa2 import probe as fa2_probe
from nsa_backend_fa2 import providers
from nsa_backend_fa2.plugin import nsa_register_backends as fa2
from nsa_backend_sdpa import win
from nsa_backend_sdpa.plugin import nsa_register_backends as sdpa
from nsa_cli import verify
from nsa_cli.app import app
from nsa_cli.verify_run import plan_one
from nsa_core.contract import Reason, Request
from nsa_core.errors import Unsupported
from nsa_core.plan.registry import Registry
from nsa_core.util.interruption import NEVER
from nsa_verify import oracle
from nsa_verify.checks import slots as checks
from nsa_verify.problems import cases
from nsa_verify.problems.combination import Combination, every_combination
from nsa_verify.run import suite
from nsa_verify.run.workers import run_tasks


def bfloat16_only(request: Request) -> list[Reason]:
    return (
        []
        if request.dtype == "bfloat16"
        else [Reason("dtype", f"needs bfloat16, got {request.dtype}", "use sdpa")]
    )


@pytest.fixture
def registry() -> Registry:
    """sdpa, and a copy of it named twin that accepts only bfloat16 and does not offer win."""
    slots = {slot: spec for slot, spec in sdpa().slots.items() if slot != "win"}
    twin = dataclasses.replace(sdpa(), name="twin", probe=f"{__name__}:bfloat16_only", slots=slots)
    return Registry(()).with_backend(sdpa()).with_backend(twin)


def test_every_combination_of_the_backends_that_accept_each_branch(registry: Registry) -> None:
    combinations = every_combination(registry, "cpu", [torch.float32, torch.bfloat16], {})
    assert {(c["cmp"], c["sel"], c["win"]) for c in combinations} == {
        (cmp, sel, "sdpa") for cmp in ("sdpa", "twin") for sel in ("sdpa", "twin")
    }
    assert len(combinations) == 4
    assert len(every_combination(registry, "cpu", [torch.float32], {})) == 1
    named = every_combination(registry, "cpu", [torch.bfloat16], {"cmp": "twin", "combine": "sdpa"})
    assert [(c["cmp"], c["combine"]) for c in named] == [("twin", "sdpa")] * 2


def test_without_backends_one_combination_is_left_to_report_why() -> None:
    assert every_combination(Registry(()), "cpu", [torch.float32], {"win": "sdpa"}) == [
        {"win": "sdpa"}
    ]


def test_a_combination_is_planned_in_a_dtype_it_supports(registry: Registry) -> None:
    subject = Combination({"cmp": "twin"}, "cpu", registry)
    plan = plan_one(subject, [torch.float32, torch.bfloat16], "quick", "both")
    assert plan.choices["cmp"].backend == "twin"
    with pytest.raises(Unsupported, match="needs bfloat16, got float32"):
        plan_one(subject, [torch.float32, torch.float16], "quick", "both")


@pytest.mark.parametrize(
    ("verdicts", "code"), [((True, True), 0), ((True, False), 1), ((None, True), 3)]
)
def test_the_command_runs_each_combination_and_prints_a_summary(
    verdicts: tuple[Any, ...],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    registry: Registry,
) -> None:
    monkeypatch.setattr(verify.output, "find_backends", lambda: registry)
    remaining_verdicts = list(verdicts)

    def run(
        combinations: list[dict[str, str]], options: Any, registry: Any, stop: Any
    ) -> list[dict[str, Any]]:
        assert (options.phase, options.jobs) == ("both", None)
        finding = {
            "check": "parity",
            "slot": "cmp",
            "case": "c",
            "dtype": "d",
            "quantity": "o",
            "detail": "why",
            **{"row": 1, "elem": None, "bias": None},
        }
        return [
            {
                "backends": {slot: f"{name} 1.0" for slot, name in named.items()},
                "seconds": 1.0,
                "device": "cpu",
                "dtypes": ["bfloat16"],
                "interpreted": False,
                "named": named,
                **{"preset": options.preset, "phase": options.phase, "seed": options.seed},
                "findings": [{**finding, "ok": remaining_verdicts.pop(0)}],
            }
            for named in combinations
        ]

    monkeypatch.setattr(verify, "run_combinations", run)
    path = tmp_path / "r.json"
    arguments = [
        "verify",
        "--every-combination",
        "--sel",
        "sdpa",
        "--dtype",
        "bfloat16",
        "--device",
        "cpu",
    ]
    done = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert done.exit_code == code, done.output
    assert f"{sum(v is True for v in verdicts)} of 2 combinations passed" in done.output
    assert [r["backends"]["cmp"] for r in json.loads(path.read_text())["combinations"]] == [
        "sdpa 1.0",
        "twin 1.0",
    ]
    assert ("FAILED parity, cmp, c, d, o: why" in done.output) == (False in verdicts)


def test_combinations_share_the_truth_of_a_case(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = dataclasses.replace(cases.quick_cases()[4], seed=1)
    jobs = [suite.Job("parity", checks.parity, case, torch.bfloat16)]
    combinations = [
        Combination({"cmp": cmp, "sel": sel}, "cpu", registry)
        for cmp in ("sdpa", "twin")
        for sel in ("sdpa", "twin")
    ]
    oracle_calls = []
    for slot in ("cmp", "sel", "win", "combine"):
        function = getattr(oracle, slot)
        monkeypatch.setattr(
            oracle,
            slot,
            lambda *args, slot=slot, function=function, **options: (
                oracle_calls.append(slot) or function(*args, **options)
            ),
        )
    separate = [[job.run(combination) for job in jobs] for combination in combinations]
    assert len(oracle_calls) == 4 * 4
    oracle_calls.clear()
    together = list(run_tasks(combinations, jobs, processes=1, stop=NEVER))
    assert sorted(oracle_calls) == ["cmp", "combine", "sel", "win"]
    assert [judged.combination for judged in together] == [0, 1, 2, 3]
    assert [[judged.findings] for judged in together] == separate


def test_a_wrong_combination_fails_beside_correct_ones(registry: Registry) -> None:
    slots = {
        **sdpa().slots,
        "win": dataclasses.replace(sdpa().slots["win"], forward=f"{__name__}:wrong_window"),
    }
    wrong = dataclasses.replace(sdpa(), name="wrong", slots=slots)
    jobs = [suite.Job("parity", checks.parity, cases.quick_cases()[4], torch.bfloat16)]
    combinations = [
        Combination({"win": name}, "cpu", registry.with_backend(wrong))
        for name in ("sdpa", "wrong", "sdpa")
    ]
    verdicts = [
        all(f.ok for f in judged.findings)
        for judged in run_tasks(combinations, jobs, processes=1, stop=NEVER)
    ]
    assert verdicts == [True, False, True]


def wrong_window(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, call: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = win.forward(q, k, v, call=call)
    o[..., 0, :] *= 1.5
    return o, lse


def test_fa2_and_sdpa_form_eight_combinations(monkeypatch: pytest.MonkeyPatch) -> None:
    """fa2 accepts bfloat16, as on a GPU, whatever this machine has."""
    monkeypatch.setattr(fa2_probe, "probe", lambda request: bfloat16_only(request))
    monkeypatch.setattr(providers, "sources", lambda: ())
    both = Registry(()).with_backend(sdpa()).with_backend(fa2())
    assert len(every_combination(both, "cpu", [torch.float32, torch.bfloat16], {})) == 8


def test_large_errors_are_short_and_aligned(capsys) -> None:
    from nsa_cli import output
    from nsa_cli.verify_report import checks_rows

    wrong = {"check": "parity", "slot": "win", "ok": False, "row": 2e12, "elem": None, "bias": 0.5}
    right = {**wrong, "check": "ties", "ok": True, "row": 520.4}
    output.print_table(output.console(), *checks_rows([wrong, right], verbose=True))
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert "2.0e+12 " in first
    assert first.index(".") == second.index(".")
