"""Generated decode steps: every pair of sizes, and faults that hand-written steps cannot show."""

from __future__ import annotations

import dataclasses
import math

import killers
import pytest
import torch

from generated_faults import Fault
from nsa_core.contract import DTYPES
from nsa_core.errors import NSAError
from nsa_core.plan.plan import Plan
from nsa_verify.checks.decode_fused import judge_composed
from nsa_verify.drawn.draw import draw
from nsa_verify.drawn.jobs import OnDrawn
from nsa_verify.drawn.judge import judge
from nsa_verify.drawn.parser import parse
from nsa_verify.drawn.shrink import ShrinkBudget
from nsa_verify.drawn.step import DecodeStep
from nsa_verify.judge import selection
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Findings
from nsa_verify.problems.step_data import packed, step_data
from nsa_verify.problems.step_runs import decode_plan, run_step

AUTO = Combination({}, name="auto")


@dataclasses.dataclass(frozen=True)
class Changed(Combination):
    """A combination whose decode form of ``slot`` receives changed arguments."""

    slot: str = ""
    change: object = None

    def plan(self, config, dtype, **fields) -> Plan:
        plan = super().plan(config, dtype, **fields)
        kernel = getattr(plan, self.slot)

        def wrapped(*tensors, **options):
            return self.change(kernel, tensors, **options)

        return dataclasses.replace(plan, **{self.slot: wrapped})


def _without_scale(kernel, tensors, call):
    scale = tensors[0].shape[-1] ** -0.5
    return kernel(*tensors, call=dataclasses.replace(call, scale=scale))


def _sixteen_blocks(kernel, tensors, call):
    q, k, v, blocks = tensors
    blocks = blocks.clone()
    blocks[..., 16:] = -1
    return kernel(q, k, v, blocks, call=call)


def _four_kv_heads(kernel, tensors, call):
    q, k, v, *rest = tensors
    heads = torch.arange(k.shape[-2]).clamp(max=3)
    return kernel(q, k[..., heads, :], v[..., heads, :], *rest, call=call)


def _up_to_a_hole(kernel, tensors, call):
    q, k, v, blocks = tensors
    return kernel(q, k, v, blocks.masked_fill((blocks < 0).cumsum(-1) > 0, -1), call=call)


def _repeats_count(kernel, tensors, call):
    """A block that is named twice in a row adds its keys twice: lse grows."""
    q, k, v, blocks = tensors
    o, lse = kernel(q, k, v, blocks, call=call)
    repeated = ((blocks[..., 1:] == blocks[..., :-1]) & (blocks[..., 1:] >= 0)).any(-1)
    per_head = repeated.repeat_interleave(q.shape[-2] // k.shape[-2], -1)
    return o, lse + per_head.transpose(-1, -2)


def _first_rows(kernel, tensors, call):
    o, lse = kernel(*tensors, call=call)
    o[:, 32:] = 0
    return o, lse


def _two_local_blocks(kernel, tensors, call):
    geometry = call.geometry
    local = min(geometry.local_blocks, 2)
    geometry = dataclasses.replace(geometry, local_blocks=local)
    return kernel(*tensors, call=dataclasses.replace(call, geometry=geometry))


FAULTS = [
    ("cmp", _without_scale),
    ("sel", _without_scale),
    ("win", _without_scale),
    ("sel", _sixteen_blocks),
    ("sel", _four_kv_heads),
    ("win", _four_kv_heads),
    ("sel", _up_to_a_hole),
    ("sel", _repeats_count),
    ("win", _first_rows),
    ("select", _two_local_blocks),
]


def test_steps_are_valid_and_have_enough_rows_for_the_bias_rule():
    steps = draw("decode", "quick", DTYPES)
    assert len(steps) == 48
    for step in steps:
        step.check()
        assert sum(step.new) >= 12
    assert max(len(step.lengths) for step in steps) >= 7
    assert any(  # the blocks from the 17th on are read
        max(step.lengths) > 17 * step.block for step in steps if step.n > 16
    )
    assert {step.gates for step in steps} == {"unit", "wide"}


def _first_failure(combination, steps):
    for step in steps:
        for finding in judge(combination, step):
            if finding.ok is False:
                return finding
    return None


@pytest.mark.few_cases("float16")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_healthy_backend_passes(dtype):
    steps = [
        dataclasses.replace(step, dtype=dtype)
        for step in draw("decode", "quick", DTYPES, seed=3)
        if step.groups < 5 and step.order == "messy"
    ]
    assert _first_failure(AUTO, steps[:2]) is None


@pytest.mark.few_cases(
    "cmp _without_scale",
    "sel _without_scale",
    "win _without_scale",
    "sel _sixteen_blocks",
    "sel _up_to_a_hole",
    "sel _repeats_count",
    "select _two_local_blocks",
)
@pytest.mark.parametrize(
    ("slot", "change"), FAULTS, ids=[f"{slot} {change.__name__}" for slot, change in FAULTS]
)
def test_fault_is_found(slot, change):
    steps = draw("decode", "quick", DTYPES)
    if change is _first_rows:
        steps = [step for step in steps if step.rows > 32]
    if change is _two_local_blocks:
        steps = [step for step in steps if step.local > 2 and step.groups < 9]
    if change is _sixteen_blocks:
        steps = [step for step in steps if step.n > 16 and step.n * step.block < 250]
    failure = _first_failure(Changed({}, slot=slot, change=change), steps)
    assert failure is not None
    assert failure.slot == slot
    killers.expect("generated steps", f"{slot} {change.__name__}", killers.killer(failure))


@pytest.mark.slow
def test_a_failing_step_shrinks_and_its_line_repeats_the_failure():
    faulty = Changed({}, slot="win", change=_four_kv_heads)
    steps = [step for step in draw("decode", "quick", DTYPES) if step.groups == 9]
    large = min(steps, key=lambda step: (step.dtype != "float32", step.h, sum(step.new)))
    check = OnDrawn(large, ShrinkBudget(20.0))
    failed = [f for f in check(faulty, None, None) if f.ok is False]
    small = parse(failed[0].case)
    assert (small.groups, small.h, small.rows, len(small.lengths)) == (5, 1, 1, 1), str(small)
    assert max(small.lengths) == 1, str(small)
    assert _first_failure(faulty, [small]).slot == "win"
    assert _first_failure(AUTO, [small]) is None


def _slightly_larger(kernel, tensors, call):
    o, lse = kernel(*tensors, call=call)
    return (o.double() * (1 + 2.5 * 2**-24)).float(), lse


@pytest.mark.parametrize(("count", "found"), [(11, False), (12, True)])
def test_the_bias_is_a_rule_for_twelve_rows(count, found):
    """The error of one row is biased towards its largest weight; shrinking reaches such steps."""
    step = DecodeStep(dv=128, w=9, lengths=(9,) * count, new=(1,) * count)
    failure = _first_failure(Changed({}, slot="win", change=_slightly_larger), [step])
    assert (failure is not None) == found
    assert not found or failure.detail.startswith("bias ")


def test_the_error_of_a_kernel_is_a_finding_with_the_line():
    def refuse(kernel, tensors, call):
        raise NSAError("a kernel fault")

    step = DecodeStep()
    finding = _first_failure(Changed({}, slot="win", change=refuse), [step])
    assert (finding.case, finding.quantity, finding.detail) == (
        str(step),
        "run",
        "a kernel fault",
    )


def exchanging(line, count):
    """Return a combination whose select has block 1 in the last ``count`` sets of SETS."""

    def exchange(blocks):
        sets = blocks.view(-1, blocks.shape[-1])
        last = (sets[:, -1] == 15).nonzero()[-count:]
        sets[last, 1] = 1
        return blocks

    if line.startswith("select"):
        name = f"exchanged {count}"
        return Fault(name, "select", outputs=lambda x, _: exchange(x[0])).combination()
    return Changed(
        {}, slot="select", change=lambda kernel, x, **options: exchange(kernel(*x, **options))
    )


# The set of a token from 60 to 63 has block 0, the best of blocks 1 to 14, and block 15.
SETS = "l=4 block=4 n=3 init=1 local=1"
JUDGED = {
    "prefill": f"select {SETS} tokens=64",
    "decode forms": f"decode {SETS} lengths=64,64 new=1,1",
    "steps of a cache": f"cache {SETS} max_len=64 step=62 step=2",
    "long chunks of a cache": f"cache {SETS} max_len=64 max_step=2 step=3 step=61",
}


EXCHANGED = pytest.mark.parametrize(
    ("count", "largest_regret", "passes"),
    [(1, math.inf, True), (1, 8.0, False), (2, math.inf, False)],
)


@EXCHANGED
@pytest.mark.parametrize("line", JUDGED.values(), ids=JUDGED)
def test_one_exchanged_set_of_few_is_allowed_if_its_regret_is(
    line, count, largest_regret, passes, monkeypatch
):
    monkeypatch.setattr(selection, "MAX_REGRET", largest_regret)
    failure = _first_failure(exchanging(line, count), [parse(line)])
    assert (failure is None) == passes


@EXCHANGED
def test_blocks_of_a_fused_step_are_judged_by_the_same_rule(
    count, largest_regret, passes, monkeypatch
):
    monkeypatch.setattr(selection, "MAX_REGRET", largest_regret)
    line = JUDGED["decode forms"]
    step = parse(line).step()
    data = step_data(step, torch.float32, "cpu")
    plan = decode_plan(exchanging(line, count), step, torch.float32)
    (blocks,) = run_step(plan, data, ("cmp", "select"))["select"]
    p = packed(step, data)
    composed = (p.pick(torch.zeros_like(data.q)), p.pick(blocks), step.exchanges)
    finding, _ = judge_composed(Findings("", step.case, torch.float32), p, *composed)
    assert (finding.quantity, finding.ok) == ("blocks", passes)
