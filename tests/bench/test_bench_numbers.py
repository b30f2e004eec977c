"""Calculations without_parts timing: shapes, costs, crossovers, comparisons."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
import time

import pytest
import torch

from nsa_bench import roofline
from nsa_bench.compare import compare, regressed
from nsa_bench.crossover import crossing
from nsa_bench.roofline import measure_peaks
from nsa_bench.shapes import parse_length, parse_lengths, parse_shape
from nsa_bench.timing import LATE, summarise
from nsa_core.contract import SLOTS
from nsa_core.errors import InvalidInput
from nsa_core.flops import visible_pairs
from nsa_verify.problems.combination import parse_combination


def test_parse_shape_accepts_names_and_heads():
    assert parse_shape("reports").name == "12/2/64"
    assert parse_shape("paper").name == "64/4/192/128"
    assert parse_shape("8/2/32").config((16, 8, 32, 4, 48)).geometry.as_ints() == [
        16,
        8,
        32,
        4,
        1,
        2,
        48,
    ]
    for wrong, text in (
        ("12/5/64", "do not divide"),
        ("report", "did you mean"),
        ("1/2", "HEADS/KV_HEADS/WIDTH"),
        ("0/1/2", "got .0/1/2."),
    ):
        with pytest.raises(InvalidInput, match=text):
            parse_shape(wrong)


def test_parse_lengths_accepts_lists_and_ranges():
    assert parse_lengths("2k..16k") == [2048, 4096, 8192, 16384]
    assert parse_lengths("512, 100,1k") == [100, 512, 1024]
    assert parse_lengths("64K,1M..4m,2147483647") == [
        *(65536, 1048576, 2097152, 4194304),
        2147483647,
    ]
    with pytest.raises(InvalidInput, match=r"'4k\.\.2k': the last length must not be smaller"):
        parse_lengths("4k..2k")


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "x", "0", "-1", "+1", "1.5k", "k", "M", "1G", "1kk", "1km", "1 k", "1_000", "\u0663"),
        *("2147483648", "2048M", "2097152k", "1k..2048M"),
        pytest.param("9" * 5000, id="5000 digits"),
    ],
)
def test_a_wrong_length_is_named_with_what_works(wrong):
    part = wrong.split("..")[-1]
    text = re.escape(f"--length: {part!r:.80} is not a number of tokens from 1 to 2147483647")
    with pytest.raises(
        InvalidInput, match=text + r", such as 512, 64k \(65536\) or 1M \(1048576\)"
    ):
        parse_lengths(f"512,{wrong}")
    assert parse_length("2", 2) == 2
    with pytest.raises(InvalidInput, match="'1' is not a number of tokens from 2 to"):
        parse_length("1", 2)


def test_combinations_are_named_in_slot_order():
    assert parse_combination("win=a, cmp=b").name == "cmp=b,win=a"
    assert parse_combination("sdpa").backends == dict.fromkeys(SLOTS, "sdpa")
    assert parse_combination("auto").backends == {}
    for wrong, text in (
        ("wim=a", "did you mean 'win'"),
        ("win=a,win=b", "twice"),
        ("win=a,b", "slot=name pairs such as"),
        ("", "must be a name"),
    ):
        with pytest.raises(InvalidInput, match=text):
            parse_combination(wrong)


@pytest.mark.parametrize("length", [2**31 - 1, 999_999_999, 1 << 20], ids=str)
def test_costs_of_long_sequences_are_exact_and_immediate(length):
    """One more token adds what its query sees."""
    config = parse_shape("tiny").config()  # l = 32, d = 16, l' = 64, n = 16, w = 512
    started = time.process_time()  # other processes may take the core
    pairs = visible_pairs(config.geometry, length)
    costs = roofline.part_costs(config, 3, length, 2, "both")
    assert time.process_time() - started < 0.05
    before = visible_pairs(config.geometry, length - 1)
    assert {name: count - before[name] for name, count in pairs.items()} == {
        "cmp": (length - 32) // 16 + 1,
        "sel": 15 * 64 + (length - 1) % 64 + 1,
        "win": 512,
        "dense": length,
    }
    # 5 + 2 products of width 32 for 4 heads
    assert costs["dense"].flops == 2 * 3 * 4 * 7 * 32 * length * (length + 1) // 2


def test_short_sequences_need_no_selection():
    config = parse_shape("tiny").config()
    for length, selects in ((1024, False), (1025, True)):
        costs = roofline.part_costs(config, 1, length, 4, "forward")
        assert (costs["select"].flops > 0, costs["select"].bytes > 0) == (selects, selects)
        slots = ("compress", "cmp", "select", "sel", "win", "combine")
        assert costs["total"].flops == sum(costs[slot].flops for slot in slots)
        assert costs["causal"].flops == costs["sel"].flops
        assert costs["causal"].bytes == costs["sel"].bytes - 4 * 2 * 16 * length  # no blocks


def test_floors_equal_those_of_the_published_table():
    """64/4/128 at 64k: 12.5 ms forward, 24.4 ms backward at 790 TFLOP/s, counted independently."""
    config, peaks = parse_shape("64/4/128").config(), roofline.Peaks(790e12, 1e20)
    floors = [
        peaks.floor_ms(roofline.part_costs(config, 1, 65536, 2, phase)["total"])
        for phase in ("forward", "backward")
    ]
    assert floors[0] == pytest.approx(12.5, rel=0.02)
    assert floors[1] == pytest.approx(24.4, rel=0.02)


def test_measured_peak_rates_are_plausible():
    state = torch.get_rng_state()
    peaks = measure_peaks("cpu", torch.float32)
    assert 1e8 < peaks.flops_per_s < 1e14
    assert 1e7 < peaks.bytes_per_s < 1e13
    assert torch.equal(torch.get_rng_state(), state)  # a resumed run measures them once more


@pytest.mark.parametrize("fastest", ["copy_", "addcmul", "sum"])
def test_the_peak_rate_of_memory_is_that_of_the_fastest_call(monkeypatch, fastest):
    """No call may exceed it, such as one that only reads."""
    now = 0.0

    def slower(name):
        def call(*_, **__):
            nonlocal now
            now += 1.0 if name == fastest else 2.0

        return call

    for owner, name in (
        (torch.Tensor, "copy_"),
        (torch, "addcmul"),
        (torch.Tensor, "sum"),
        (torch, "mm"),
    ):
        monkeypatch.setattr(owner, name, slower(name))
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: now)
    assert measure_peaks("cpu", torch.float32).bytes_per_s == 2**27


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults on Linux")
def test_the_first_cell_has_no_repeated_page_faults():
    """Use a new process, because this one has freed large blocks already."""
    program = """
import resource, torch
from nsa_core import nsa_attention
from nsa_bench import clocks, inputs, shapes
torch.set_num_threads(1)
clocks.clock_for("cpu")
config = shapes.parse_shape("tiny").config()
options = {"dtype": torch.float32, "device": "cpu", "seed": 0}
x = inputs.make_inputs("random", config, batch=1, length=256, **options)
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with torch.no_grad():
        nsa_attention(x.q, x.k, x.v, x.gates, config=config)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 5000  # 33,000 if every call faults its pages in again


def test_the_cost_of_both_is_the_sum_of_forward_and_backward():
    config = parse_shape("reports").config()
    forward, backward, both = (
        roofline.part_costs(config, 2, 999, 4, p) for p in ("forward", "backward", "both")
    )
    for name, cost in both.items():
        assert cost.flops == forward[name].flops + backward[name].flops
        assert cost.bytes == forward[name].bytes + backward[name].bytes


@pytest.mark.parametrize(
    ("pairs", "length", "text"),
    [
        ([], None, "not known"),
        (
            [(1024, 3.0), (2048, 1.5)],
            None,
            "dense is faster at every measured length, up to 2048 tokens",
        ),
        ([(1024, 0.5), (2048, 0.4)], 1024, "at every measured length"),
        ([(1024, 2.0), (2048, 0.5)], round(1024 * math.sqrt(2)), "between 1024 and 2048"),
        ([(512, 0.9), (1024, 2.0), (2048, 0.5)], round(1024 * math.sqrt(2)), "from about"),
        ([(1024, 0.5), (2048, 1.0)], None, "dense is faster at 2048 tokens (1.00"),
        ([(2048, 1.012)], None, "dense is faster at 2048 tokens (1.01 times as fast there)"),
        ([(2048, 1.55)], None, "(1.55 times as fast there)"),
    ],
)
def test_crossing_finds_the_length_and_a_sentence(pairs, length, text):
    crossover, sentence = crossing(pairs)
    assert crossover == length
    assert text in sentence


def test_summarise_returns_median_and_quartiles():
    p = summarise([5.0, 1.0, 2.0, 3.0, 4.0], "events")
    assert (p.median_ms, p.q1_ms, p.q3_ms) == (3.0, 2.0, 4.0)
    assert p.samples_ms == [5.0, 1.0, 2.0, 3.0, 4.0]  # in the order they were taken


@pytest.fixture
def result(run):
    return run(lengths=[40], phases=["forward"])


def slower(result, factor, spread=0.0, performance=True):
    """Return ``result`` with every total multiplied by ``factor``."""

    def scaled(m):
        p = m.performance
        new = dataclasses.replace(
            p,
            median_ms=p.median_ms * factor,
            q1_ms=p.q1_ms * factor * (1 - spread),
            q3_ms=p.q3_ms * factor,
        )
        return dataclasses.replace(m, performance=new if performance else None)

    return dataclasses.replace(result, measurements=[scaled(m) for m in result.measurements])


def test_compare_detects_only_slowdowns_beyond_the_noise(result):
    assert not regressed(compare(result, result, fail_over=0.0))
    bad = regressed(compare(result, slower(result, 100.0), fail_over=0.05))
    assert {c.verdict for c in bad} == {"slower"}
    assert {c.key[-1] for c in bad} == {"total"}
    assert not regressed(compare(result, slower(result, 100.0), fail_over=1000.0))  # tolerated
    # within the noise
    assert not regressed(compare(result, slower(result, 100.0, spread=0.9999), fail_over=0.05))
    assert not regressed(compare(slower(result, 100.0), result, fail_over=0.05))  # faster
    lost = regressed(compare(result, slower(result, 1.0, performance=False), fail_over=0.05))
    assert {c.verdict for c in lost} == {"lost"}


def without_parts(result, reason):
    """Return ``result`` without part times, for ``reason``."""

    def bare(m):
        parts = {
            name: dataclasses.replace(p, performance=None, reason=reason)
            for name, p in m.parts.items()
        }
        return dataclasses.replace(m, parts=parts)

    return dataclasses.replace(result, measurements=[bare(m) for m in result.measurements])


def test_skipped_parts_are_missing_and_failed_parts_are_lost(result):
    left_out, failed = (
        without_parts(result, LATE),
        without_parts(result, "failed: RuntimeError: no"),
    )
    changes = compare(result, left_out, fail_over=0.05)
    assert {(c.verdict, c.note) for c in changes} == {("same", ""), ("missing", LATE)}
    assert {c.verdict for c in regressed(changes)} == {"missing"}
    assert not regressed(changes, allow_missing=True)
    assert {c.verdict for c in compare(left_out, result, fail_over=0.05)} == {"same", "new"}
    assert not left_out.failed
    assert {c.verdict for c in regressed(compare(result, failed, fail_over=0.05))} == {"lost"}
    assert failed.failed


def test_compare_refuses_different_devices_unless_forced(result):
    other = dataclasses.replace(result, environment=result.environment | {"device": "another"})
    with pytest.raises(InvalidInput, match="another"):
        compare(result, other, fail_over=0.05)
    assert compare(result, other, fail_over=0.05, force=True)
    real = dataclasses.replace(result, settings=result.settings | {"inputs": ["random", "real"]})
    trained = dataclasses.replace(
        real, settings=real.settings | {"checkpoints": {"2/1/8": {"file": "x"}}}
    )
    with pytest.raises(InvalidInput, match="checkpoints"):
        compare(real, trained, fail_over=0.05)
    assert compare(result, trained, fail_over=0.05)  # they share random inputs
    nothing = dataclasses.replace(result, measurements=[])
    with pytest.raises(InvalidInput, match="in common"):
        compare(result, nothing, fail_over=0.05)


def test_real_inputs_depend_on_text_and_seed():
    from nsa_bench.inputs import make_inputs

    config = parse_shape("2/1/8").config((8, 4, 16, 3, 24))

    def make(kind, text=b"some words", seed=0, length=30):
        return make_inputs(
            kind,
            config,
            batch=2,
            length=length,
            dtype=torch.float32,
            device="cpu",
            seed=seed,
            text=text,
        )

    real = make("real")
    assert real.q.shape == (2, 30, 2, 8)
    assert real.gates.shape == (2, 30, 2, 3)
    # The text repeats after ten bytes, v does not depend on the position, and an embedding depends
    # on the preceding 64 bytes.
    far = make("real", length=90).v[0]
    torch.testing.assert_close(far[70], far[80])
    assert not torch.allclose(far[70], far[79])
    assert not torch.equal(real.q, make("real", b"other words").q)
    assert torch.equal(real.q, make("real").q)
    assert not torch.equal(make("random").q, make("random", seed=1).q)
    with pytest.raises(InvalidInput, match="0 bytes"):
        make("real", b"")
    with pytest.raises(InvalidInput, match="random, real"):
        make("fake")
