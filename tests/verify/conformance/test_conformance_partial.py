"""The conformance suite judges queries inside a sequence where the backend declares them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from nsa_core.contract import BackendSpec, import_named
from nsa_core.plan.registry import discover
from nsa_verify.conformance import BackendConformance
from nsa_verify.drawn.parser import parse
from nsa_verify.run import suite
from semantic.model import FUNCTIONS, healthy_spec

LINE = suite.job_of_line(parse("select l=4 d=2 block=16 n=2 tokens=61 first_query=37"))


def suite_of(spec: BackendSpec) -> BackendConformance:
    made = type("Suite", (BackendConformance,), {"registry": discover().with_backend(spec)})()
    made.backend, made._device = spec.name, "cpu"
    return made


def test_declared_partial_queries_are_judged() -> None:
    suite_of(healthy_spec()).test_verify(LINE)


def test_wrong_partial_queries_fail() -> None:
    spec = healthy_spec()
    healthy = import_named(spec.slots["select"].forward)

    def forward(*tensors: torch.Tensor, call: Any) -> Any:
        return healthy(*tensors, call=dataclasses.replace(call, first_query=0))

    FUNCTIONS.conformance_forward = forward  # type: ignore[attr-defined]
    path = f"{FUNCTIONS.__name__}:conformance_forward"
    own = dataclasses.replace(spec.slots["select"], forward=path)
    faulty = dataclasses.replace(spec, name="offset_lost", slots={"select": own})
    with pytest.raises(pytest.fail.Exception, match=r"partial queries, given line:\n  select "):
        suite_of(faulty).test_verify(LINE)


def test_partial_queries_are_skipped_with_the_reason() -> None:
    spec = healthy_spec()
    own = dataclasses.replace(spec.slots["select"], partial=False)
    plain = suite_of(dataclasses.replace(spec, slots={**spec.slots, "select": own}))
    with pytest.raises(pytest.skip.Exception, match="does not"):
        plain.test_verify(LINE)
