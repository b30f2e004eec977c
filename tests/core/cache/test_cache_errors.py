"""A cache operation that raises leaves the cache as it was, wherever the error occurs."""

from __future__ import annotations

import pytest
import torch

from injection import BATCH, ERRORS, SCENARIOS, RaiseAt, RaiseAtOpcode, Run, append, layer
from nsa_core import NSAError
from nsa_core.cache import step

BLOCKS = ("prefill", "one token that completes a block", "several tokens", "cut into chunks")
INTERRUPTED = (
    "one token that completes a block",
    "several tokens",
    "one token on shared pages",
    "cut into chunks",
    "crop",
    "reset",
    "reorder",
    "snapshot",
    "load",
    "reserve",
)


@pytest.fixture(scope="module")
def attn():
    attn = layer()
    for name in SCENARIOS:  # the first prefill of a size resolves its plan
        if "prefill" in name:
            Run(attn, SCENARIOS[name], None).operate()
    return attn


@pytest.fixture
def scenario_of(monkeypatch):
    """Return a scenario by name, with its patches applied."""

    def scenario(name):
        scenario = SCENARIOS[name]
        monkeypatch.setattr(step, "MAX_CHUNK_ROWS", scenario.rows)
        if scenario.device_counts:

            def device_counts(cache, rows, new, in_graph):
                on_device = torch.full((BATCH,), rows) if new is None else torch.tensor(new)
                return step.NewTokens(rows, [rows] * BATCH, on_device.int(), exact=False)

            monkeypatch.setattr(step, "new_tokens", device_counts)
        return scenario

    return scenario


def assert_same(actual, golden):
    assert len(actual) == len(golden)
    for y, expected in zip(actual, golden):
        assert not expected.isnan().any()
        assert torch.equal(y, expected)


FOLLOW = (Run.retry_briefly, Run.crop_and_go_on, Run.retry, Run.retry_briefly)


def check_injections(attn, scenario, page_size, injector, numbers):
    """Inject an error at each of ``numbers``, and compare what follows with a cache without it."""
    golden = {}
    before = Run(attn, scenario, page_size).state()
    done = Run(attn, scenario, page_size)
    if injector is RaiseAtOpcode:
        done.operate()
    for i, number in enumerate(numbers):
        run = Run(attn, scenario, page_size)
        try:
            with injector(number):
                run.operate()
        except (*ERRORS, NSAError):
            pass
        else:
            pytest.fail(f"no error at {number}")
        if injector is RaiseAtOpcode and run.state() == done.state() != before:
            continue  # the interrupt came after the last change
        assert run.state() == before, number
        follow = FOLLOW[i % 4]
        if follow not in golden:
            golden[follow] = follow(Run(attn, scenario, page_size))
        assert_same(follow(run), golden[follow])
        assert run.cache.undo is None
        assert not run.free_all()


def number_of_points(attn, scenario, page_size, injector):
    Run(attn, scenario, page_size).operate()  # the first one may resolve a plan
    run = Run(attn, scenario, page_size)
    with injector(None) as counter:
        run.operate()
    return counter.count


def raise_at(number):
    return RaiseAt(number, ERRORS[(number or 0) % 3])


@pytest.mark.few_cases(
    "0-prefill",
    "2-prefill after a crop to zero",
    "4-one token that completes a block",
    "6-ragged tokens",
    "8-chunk",
    "10-cut into chunks",
    "12-one token after a crop",
    "14-one token on shared pages",
    "16-crop",
    "19-reorder of some",
    "21-load",
    "23-reserve",
)
@pytest.mark.parametrize(("position", "name"), list(enumerate(SCENARIOS)))
def test_error_at_some_operator(attn, scenario_of, name, position):
    """A step has one error, at its last operator or earlier; other operations have both.

    What follows the second error does not repeat the operation, because a repeated load or reorder
    writes the rows that an undo has lost.
    """
    scenario = scenario_of(name)
    last = number_of_points(attn, scenario, 16, raise_at) - 1
    numbers = (2 * last // 3, last)
    if Run(attn, scenario, 16).operate() is not None:
        numbers = (numbers[position % 2],)
    check_injections(attn, scenario, 16, raise_at, numbers)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_error_at_every_operator(attn, scenario_of, name, record_property):
    scenario = scenario_of(name)
    numbers = range(number_of_points(attn, scenario, 16, raise_at))
    check_injections(attn, scenario, 16, raise_at, numbers)
    record_property("injection points", len(numbers))
    print(f"{name}: {len(numbers)} injection points")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SCENARIOS) - {"reserve"}))
def test_error_at_operators_without_pages(attn, scenario_of, name, record_property):
    scenario = scenario_of(name)
    last = number_of_points(attn, scenario, None, raise_at) - 1
    numbers = [*range(0, last, 23), last]
    check_injections(attn, scenario, None, raise_at, numbers)
    record_property("injection points", len(numbers))
    print(f"{name}: {len(numbers)} injection points")


@pytest.mark.parametrize("name", INTERRUPTED)
def test_interrupt_at_some_bytecode(attn, scenario_of, name):
    scenario = scenario_of(name)
    count = number_of_points(attn, scenario, 16, RaiseAtOpcode)
    check_injections(attn, scenario, 16, RaiseAtOpcode, [4 * count // 5])


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERRUPTED)
def test_interrupt_at_many_bytecodes(attn, scenario_of, name, record_property):
    scenario = scenario_of(name)
    numbers = range(0, number_of_points(attn, scenario, 16, RaiseAtOpcode), 29)
    check_injections(attn, scenario, 16, RaiseAtOpcode, numbers)
    record_property("injection points", len(numbers))
    print(f"{name}: {len(numbers)} interrupts")


class HookError(Exception):
    """Raised by the hooks of these tests."""


def fail(*args):
    raise HookError


@pytest.mark.few_cases
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("module", ["", "out", "qkv", "gate", "phi_v"])
def test_error_in_a_hook(attn, scenario_of, name, module):
    """Also in a hook of the layer itself, which runs after forward."""
    scenario = scenario_of(name)
    golden, run = Run(attn, scenario, 16).retry(), Run(attn, scenario, 16)
    before = run.state()
    hook = attn.get_submodule(module).register_forward_hook(fail)
    try:
        with pytest.raises(HookError):
            run.operate()
    finally:
        hook.remove()
    assert run.state() == before
    assert_same(run.retry(), golden)


@pytest.mark.parametrize("name", BLOCKS)
def test_error_in_out_without_the_hooks_of_the_layer(attn, scenario_of, name, monkeypatch):
    """A call of forward, which some wrappers make."""
    scenario = scenario_of(name)
    golden, run = Run(attn, scenario, 16).retry(), Run(attn, scenario, 16)
    before = run.state()
    monkeypatch.setattr(type(attn), "__call__", type(attn).forward)
    hook = attn.out.register_forward_hook(fail)
    try:
        with pytest.raises(HookError):
            run.operate()
    finally:
        hook.remove()
    assert run.state() == before
    assert_same(run.retry(), golden)


@pytest.mark.few_cases
@pytest.mark.parametrize("name", ["several tokens", "cut into chunks", "reorder", "load"])
@pytest.mark.parametrize("operator", [0.3, 0.9])
def test_error_while_an_error_is_undone(attn, scenario_of, name, operator):
    """For example a second interrupt: the next operation undoes the first one."""
    scenario = scenario_of(name)
    golden, run = Run(attn, scenario, 16).retry(), Run(attn, scenario, 16)
    number = int(operator * number_of_points(attn, scenario, 16, raise_at))
    with pytest.raises(KeyboardInterrupt), RaiseAt(number, KeyboardInterrupt, more=1):
        run.operate()
    assert_same(run.retry(), golden)
    assert run.cache.undo is None
    assert not run.free_all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_error_in_every_grad_mode(attn, scenario_of, mode):
    """The retry may run in another mode than the step that failed."""
    scenario = scenario_of("cut into chunks")
    golden, run = Run(attn, scenario, 16).retry(), Run(attn, scenario, 16)
    before = run.state()
    hook = attn.out.register_forward_hook(fail)
    try:
        with pytest.raises(HookError), mode():
            run.operate()
    finally:
        hook.remove()
    assert run.state() == before
    assert_same(run.retry(), golden)


def test_error_of_a_captured_step_changes_nothing_on_the_device(attn, monkeypatch):
    """While a graph is captured, no operator runs, so nothing on the device needs an undo."""
    run = Run(attn, SCENARIOS["one token"], 16)
    run.cache.reserve(80)
    bounds, counts = run.cache.bounds, []
    monkeypatch.setattr(step, "is_capturing", lambda device: True)

    def fail_and_count(*args):
        counts.append(counter.count)
        raise HookError

    hook = attn.out.register_forward_hook(fail_and_count)
    try:
        with pytest.raises(HookError), RaiseAt(None, HookError) as counter:
            run.operate()
    finally:
        hook.remove()
    assert counts == [counter.count]
    assert run.cache.bounds is bounds
    assert not run.cache.captured


def test_operation_in_a_hook_of_a_step(attn):
    """It belongs to the step: an error after it undoes both."""
    run = Run(attn, SCENARIOS["one token"], 16)
    golden, snapshots = Run(attn, SCENARIOS["one token"], 16).retry(), []
    before = run.state()
    hooks = [
        attn.register_forward_hook(lambda *args: snapshots.append(run.cache.snapshot(0))),
        attn.register_forward_hook(fail),
    ]
    try:
        with pytest.raises(HookError):
            run.operate()
    finally:
        for hook in hooks:
            hook.remove()
    snapshots.pop().release()
    assert run.state() == before
    assert_same(run.retry(), golden)


def test_refused_step_and_full_pool_change_nothing(attn):
    run = Run(attn, SCENARIOS["one token on shared pages"], 16, num_pages=14)
    run.cache.reserve([90, 90, 44])
    before = run.state()
    for rows, message in ((80, "max_len is 90"), (40, "need 3 more pages of 16 tokens, 2 of 14")):
        with pytest.raises(ValueError, match=message):
            append(rows, [0, 0, rows])(attn, run.cache, {})
        assert run.state() == before
