"""The decode form of cmp, with the fake library on the CPU and flash-attn on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fa2_standin import Library, make
from nsa_backend_fa2 import decode, providers
from nsa_backend_fa2 import probe as probes
from nsa_core.errors import Unsupported
from nsa_core.plan.plan import resolve
from nsa_verify.checks.decode_parity import judge_step
from nsa_verify.problems.cases import PAPER, TINY, Case, config_of
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.step_data import step_data
from nsa_verify.problems.steps import Step
from slot_requests import make_request

RAGGED = (1, 7, 8, 11, 12, 64, 77)
STEPS = {
    "contiguous": Step(Case("contiguous", config_of(4, 2, 16, 16, TINY), ()), RAGGED, (1,) * 7),
    "contiguous, several rows": Step(
        Case("rows", config_of(3, 1, 24, 24, TINY), ()), (5, 8, 31, 40), (5, 0, 3, 5), rows=5
    ),
    "pages": Step(
        Case("pages", config_of(4, 4, 8, 8, TINY), ()),
        (2100, 1024, 30),
        (1, 2, 0),
        2,
        page_size=1024,
    ),
    "h=1": Step(Case("h=1", config_of(2, 2, 16, 16, TINY), ()), (70, 9), (1, 1)),
}
REQUEST = make_request("cmp", None, phase="decode", needs_grad=False, batch=None)


def findings(
    step: Step, dtype: torch.dtype, device: str = "cpu", scale: float | None = None
) -> list:
    if scale is not None:
        config = dataclasses.replace(step.case.config, scale=scale)
        step = dataclasses.replace(step, case=dataclasses.replace(step.case, config=config))
    data = step_data(step, dtype, device)
    outputs = decode.cmp(data.q, data.stores["k_cmp"], data.stores["v_cmp"], call=data.call)
    return list(judge_step(step, dtype, data, {"cmp": outputs}, ("cmp",)))


@pytest.mark.few_cases
@pytest.mark.parametrize("scale", [None, -0.3, 0.0])
@pytest.mark.parametrize("name", STEPS)
def test_decode_cmp_matches_the_oracle_in_one_call(
    name: str, scale: float | None, library: Library
) -> None:
    results = findings(STEPS[name], torch.float32, scale=scale)
    assert {f.quantity for f in results} >= {"o", "lse"}
    assert not [f for f in results if not f.ok]
    assert len(library.calls) == 1  # all queries of the step
    # The library gets the cache itself instead of a copy.
    assert library.calls[0]["k"][0] == len(step_data(STEPS[name], torch.float32).stores["k_cmp"])


def test_decode_cmp_splits_queries_above_the_limit_of_a_call(library: Library, monkeypatch) -> None:
    monkeypatch.setattr(decode, "MAX_BATCH", 3)
    assert all(f.ok for f in findings(STEPS["contiguous"], torch.bfloat16))
    assert [call["q"][0] for call in library.calls] == [3, 3, 1]


def test_nan_in_a_query_stays_nan(library: Library) -> None:
    data = step_data(STEPS["contiguous"], torch.float32)
    data.q[-1] = torch.nan
    o, lse = decode.cmp(data.q, data.stores["k_cmp"], data.stores["v_cmp"], call=data.call)
    assert o[-1].isnan().all()
    assert lse[-1].isnan().all()
    assert not o[:-1].isnan().any()


def test_nan_in_a_key_reaches_the_lse_of_every_row_that_sees_it(library: Library) -> None:
    """The library leaves a split of the keys whose sum is NaN out of the LSE."""
    data = step_data(STEPS["contiguous"], torch.float32)
    data.stores["k_cmp"][data.call.tables.cmp[-1, 0], 0] = torch.nan  # of the last sequence
    o, lse = decode.cmp(data.q, data.stores["k_cmp"], data.stores["v_cmp"], call=data.call)
    assert o[-1].isnan().all()
    assert lse[-1].isnan().all()
    assert not lse[:-1].isnan().any()


@pytest.mark.parametrize(
    ("provider", "change", "code"),
    [
        ("2.8.3", {}, None),
        ("2.6.3", {}, None),
        ("2.8.3", {"page_size": 4096}, None),
        ("2.8.3", {"n_heads": 4096}, None),
        ("2.8.3", {"page_size": 128}, "page_size"),
        ("2.8.3", {"head_dim": 192, "v_head_dim": 128}, "head_dim_decode"),
        ("2.8.3", {"head_dim": 65, "v_head_dim": 65}, "head_dim_decode"),
        ("2.8.3", {"slot": "win"}, "ring"),
        ("2.8.3", {"slot": "sel"}, "gathered_blocks"),
        ("2.5.8", {}, "no_kvcache"),
        ("aten", {}, "no_kvcache"),
    ],
)
def test_probe_of_decode_requests(
    provider: str, change: dict, code: str | None, use_provider
) -> None:
    use_provider(provider)
    assert [reason.code for reason in probes.probe(dataclasses.replace(REQUEST, **change))] == (
        [code] if code else []
    )


def test_decode_without_the_package_raises_with_the_provider_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(providers, "active_provider", lambda: make("aten", Library()))
    with pytest.raises(RuntimeError, match=r"PyTorch .* has no attention over a cache"):
        findings(STEPS["h=1"], torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page", [None, 4096])
def test_decode_cmp_on_flash_attn_matches_the_oracle(page: int | None, dtype: torch.dtype) -> None:
    source = next(source for source in providers.sources() if source.name == "flash-attn")
    if source.provider is None:
        pytest.skip(str(source.reason))
    lengths = (9000, 4096, 31, 33, 700, 5000, 47, 1)
    step = Step(
        Case("GPU", config_of(12, 2, 64, 64, PAPER), ()), lengths, (*(4,) * 7, 1), 4, page_size=page
    )
    assert not [f for f in findings(step, dtype, "cuda") if not f.ok]
    plan = Combination({"cmp": "fa2"}, "cuda").plan(
        step.case.config, dtype, needs_grad=False, phase="decode", page_size=page
    )
    assert plan.choices["cmp"].backend == "fa2"


def test_error_of_win_chosen_by_name_for_decode_gives_the_reason() -> None:
    with pytest.raises(Unsupported, match="a ring holds them turned"):
        resolve(config_of(4, 2, 16, 16, TINY), phase="decode", backends={"win": "fa2"})
