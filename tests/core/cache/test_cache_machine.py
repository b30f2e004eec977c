"""Any history of a cache, with errors at any point: it holds what a prefill would write.

The replay of `nsa verify` runs the operations. After each one, every key and value that a step may
read, now or after a crop, must have the bits of a prefill, and the output of a step is judged
against the oracle on whole sequences. An operation that raises must leave the cache as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from injection import AUTO, ERRORS, RaiseAt, RaiseAtOpcode, RaiseInHook, state, undone
from nsa_core import InvalidInput
from nsa_core.cache import step
from nsa_core.cache.cache import resized
from nsa_verify.drawn.caches.draw import ACTIONS, draw_operation
from nsa_verify.drawn.caches.history import Operation
from nsa_verify.drawn.caches.judge import plans_of
from nsa_verify.drawn.caches.outputs import judge_output
from nsa_verify.drawn.caches.replay import Replay
from nsa_verify.drawn.draw import draw
from nsa_verify.drawn.jobs import PAGE_EDGES
from nsa_verify.drawn.judge import judge
from nsa_verify.drawn.parser import parse

MODES = (torch.no_grad, torch.inference_mode, torch.enable_grad)
WAYS = ("run",) * 4 + ("run_with_an_error",) * 5 + ("count_on_the_device", "capture", "resize")
# An injected error has a number up to these: about as many operators and opcodes as run.
OPERATORS, OPCODES = {"step": 400}, {"step": 3000}


def injected(rng, layer, kind):
    """Return an error at a random operator or opcode of an operation, or in a random hook."""
    error = rng.choice(ERRORS)
    at_operator = RaiseAt(rng.randrange(OPERATORS.get(kind, 24)), error, rng.randrange(2))
    if kind in ("save", "release"):  # an interrupt may lose a snapshot, so that it has no number
        return at_operator
    at_opcode = RaiseAtOpcode(rng.randrange(OPCODES.get(kind, 400)))
    if kind != "step":
        return rng.choice((at_operator, at_opcode))
    hooked = rng.choice(("", "out", "qkv", "gate", "phi_v"))
    in_hook = RaiseInHook(layer.get_submodule(hooked))
    return rng.choice((at_operator, at_operator, at_opcode, in_hook))


class CacheMachine(RuleBasedStateMachine):
    """A layer, its cache, and the sequences that the cache must hold."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    @initialize(seed=st.integers(0, 2**32))
    def create(self, seed):
        history = draw("cache", "quick", ["float64"], seed=11, count=24)[self.number]
        self.random = random.Random(f"{self.number} {seed}")
        note(str(history.replace(operations=())))
        self.replay = Replay(history, plans_of(AUTO, history))
        self.context = contextlib.ExitStack()
        self.context.enter_context(self.replay.short_chunks())
        self.context.callback(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(True)  # new memory is NaN

    def teardown(self):
        if hasattr(self, "replay"):
            self.context.close()
            self.check(self.replay.page_faults())

    @staticmethod
    def check(faults):
        for fault in faults:
            pytest.fail(str(fault))

    def drawn(self, actions=ACTIONS):
        operation = draw_operation(self.random, self.replay.history, self.replay.model, actions)
        if operation.kind == "step" and self.random.random() < 0.05:
            operation = dataclasses.replace(operation, padding=200)  # more than the cache holds
        note(str(operation))
        return operation

    def operate(self, operation, run=None):
        self.check(self.replay.faults_of(operation, judge_output, run))

    @rule(mode=st.sampled_from(MODES))
    def act(self, mode):
        """Do one of the following. Rules of their own would occur in few of the histories."""
        with mode():
            getattr(self, self.random.choice(WAYS))()
        assert self.replay.cache.peaks == [s.peak for s in self.replay.model.sequences]

    def run(self):
        self.operate(self.drawn())

    def run_with_an_error(self):
        operation = self.drawn((*ACTIONS, "load", "load", "reorder", "reorder"))
        injector = injected(self.random, self.replay.attn, operation.kind)
        note(f"with {type(injector).__name__} {vars(injector)}")
        self.operate(operation, undone(self.replay, injector))

    def count_on_the_device(self):
        """Take a step for which the host has upper bounds: every row counts as a token."""
        operation, model = self.drawn(("step",)), self.replay.model
        rows, batch = operation.rows, len(operation.values)
        bounds = Operation("step", (rows,) * batch)
        if model.refused(bounds) or model.may_lack_pages(bounds):
            return

        def new_tokens(cache, rows, new, in_graph):
            return step.NewTokens(rows, [rows] * batch, torch.tensor(operation.values).int(), False)

        model.apply(Operation("reserve", tuple(length + rows for length in model.lengths)))
        with mock.patch.object(step, "new_tokens", new_tokens):
            self.operate(operation)

    def capture(self):
        """Take a step as in the replay of a CUDA graph: the host reads nothing, nor raises."""
        model, cache = self.replay.model, self.replay.cache
        rows = self.random.randint(1, min(6, cache.max_step))
        if self.random.random() < 0.5:
            before = state(cache)
            cache.reserve_workspace(rows)
            assert state(cache) == before
        new = [self.random.randint(0, rows) for _ in model.lengths]
        room = [max(room - n, 0) for room, n in zip(cache.table.room, model.lengths)]
        fitting = tuple(map(min, new, room))
        note(f"captured step of {new}, room for {room}")

        def run(operation):
            call = self.replay.prepared(operation, torch.tensor(new, dtype=torch.int32))
            with mock.patch.object(step, "is_capturing", return_value=True):
                return call()

        known = cache.overflowed.tolist()
        self.operate(Operation("step", fitting, rows - max(fitting)), run)
        overflows = [flag or n > fits for flag, n, fits in zip(known, new, fitting)]
        assert cache.overflowed.tolist() == overflows
        if any(overflows) and self.random.random() < 0.5:
            with pytest.raises(InvalidInput, match="did not fit and were not written"):
                cache.check()
            cache.check()

    def resize(self):
        lengths, cache = self.replay.model.lengths, self.replay.cache
        if cache.pages is not None:
            return
        order = self.random.choices(range(len(lengths)), k=self.random.randint(1, 4))
        max_len = max(1, *(lengths[b] for b in order)) + self.random.randint(0, 30)
        note(f"resize to {order} of at most {max_len} tokens")
        before = state(cache)
        copy = resized(cache, max_len, order)
        copy.plan = cache.plan
        history = self.replay.history.replace(batch=len(order), max_len=max_len)
        model = self.replay.model
        model.sequences = [model.sequences[b].copy() for b in order]
        model._history, model.snapshots = history, [None] * len(model.snapshots)
        self.replay.cache, self.replay.history = copy, history
        assert state(cache) == before
        self.check(self.replay.content_faults())


def check_histories(number, count):
    """Check histories of one layer and cache. Hypothesis repeats parts of them to make others."""
    options = settings(
        max_examples=count,
        stateful_step_count=25,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: CacheMachine(number), settings=options)


@pytest.mark.parametrize("number", range(12))
def test_any_history(number):
    check_histories(number, 2)


@pytest.mark.parametrize("line", PAGE_EDGES)
def test_history_of_a_page_edge(line):
    """Few drawn histories have it."""
    failed = [finding for finding in judge(AUTO, parse(line)) if not finding.ok]
    assert not failed, failed[0].detail


@pytest.mark.slow
@pytest.mark.parametrize("number", range(24))
def test_many_histories(number):
    check_histories(number, 30)
