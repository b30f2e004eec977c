"""The conformance suite judges queries inside a sequence where the backend declares them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from nsa_core.contract import BackendSpec, import_named
from nsa_core.plan.registry import discover
from nsa_verify.conformance import BackendConformance
from semantic.model import FUNCTIONS, healthy_spec


def suite_of(spec: BackendSpec) -> BackendConformance:
    made = type("Suite", (BackendConformance,), {"registry": discover().with_backend(spec)})()
    made.backend, made._device = spec.name, "cpu"
    return made


@pytest.mark.slow
def test_declared_partial_queries_are_judged() -> None:
    suite_of(healthy_spec()).test_partial_queries_are_correct("select")


@pytest.mark.slow
def test_wrong_partial_queries_fail_with_their_case() -> None:
    spec = healthy_spec()
    healthy = import_named(spec.slots["select"].forward)

    def forward(*tensors: torch.Tensor, call: Any) -> Any:
        return healthy(*tensors, call=dataclasses.replace(call, first_query=0))

    FUNCTIONS.conformance_forward = forward  # type: ignore[attr-defined]
    path = f"{FUNCTIONS.__name__}:conformance_forward"
    own = dataclasses.replace(spec.slots["select"], forward=path)
    faulty = dataclasses.replace(spec, name="offset_lost", slots={"select": own})
    with pytest.raises(pytest.fail.Exception, match=r"select, partial:\n  select .* first_query="):
        suite_of(faulty).test_partial_queries_are_correct("select")


def test_partial_queries_are_skipped_with_the_reason() -> None:
    spec = healthy_spec()
    own = dataclasses.replace(spec.slots["win"], partial=False)
    plain = suite_of(dataclasses.replace(spec, slots={**spec.slots, "win": own}))
    with pytest.raises(pytest.skip.Exception, match="does not declare partial for win"):
        plain.test_partial_queries_are_correct("win")
    with pytest.raises(pytest.skip.Exception, match="combine reads no keys"):
        plain.test_partial_queries_are_correct("combine")
