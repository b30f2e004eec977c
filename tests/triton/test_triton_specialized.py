"""Kernels compiled for the integer arguments that Triton specializes.

Triton makes an integer argument equal to 1 a constant, and marks a multiple of 16. A kernel that
calls a method on such an argument fails to compile if the argument is 1, for example with one kv
head. Such errors arise in the translation of a kernel's Python to Triton's own IR (TTIR), so the
ordinary tests stop there, after about 50 ms a kernel. The interpreter does not specialize, so the
interpreted tests cannot find them.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
from collections.abc import Iterator

import pytest
import torch

from nsa_verify.conformance.points import Point
from nsa_verify.drawn.draw import draw
from nsa_verify.problems.cases import full_cases

triton = pytest.importorskip("triton")
tl = importlib.import_module("triton.language")
compile_table = importlib.import_module("compile_table")
offline = importlib.import_module("offline")
configs = importlib.import_module("nsa_backend_triton.host.configs")

SLOTS = ("cmp", "select", "sel", "win", "combine")
# of groups of at most 8 query heads, from 16384 tokens on
BUCKETS = {
    "sel_bucket_kernel",
    "sel_merge_kernel",
}


def all_launches(architecture: int):
    """Launches of every slot, dense and packed, and of decode steps of one and of four tokens.

    Those whose queries begin inside a sequence come too.
    """
    for slot, varlen, groups, deterministic in itertools.product(
        SLOTS, (False, True), (4, 16), (False, True)
    ):
        if deterministic and slot != "sel":
            continue
        request = dataclasses.replace(
            compile_table._BASE,
            slot=slot,
            varlen=varlen,
            n_kv_heads=groups,
            deterministic=deterministic,
        )
        yield from compile_table.launches(request, architecture)
    for slot, varlen in itertools.product(("cmp", "select", "sel", "win"), (False, True)):
        request = dataclasses.replace(compile_table._BASE, slot=slot, varlen=varlen, partial=True)
        yield from compile_table.launches(request, architecture)
        if slot == "sel":
            few = dataclasses.replace(request, n_kv_heads=16, seq_len=16384)
            yield from compile_table.launches(few, architecture)
    for varlen in (False, True):
        request = dataclasses.replace(compile_table._BASE, varlen=varlen)
        yield from compile_table.core_launches(request, architecture)
        if varlen:
            continue
        for partial, groups in ((False, 4), (True, 16)):  # the bitmask form of sel
            changes = {"slot": "sel", "seq_len": 1024, "partial": partial, "n_kv_heads": groups}
            short = dataclasses.replace(compile_table._BASE, **changes)
            yield from compile_table.launches(short, architecture)
            short = dataclasses.replace(short, varlen=True)
            yield from compile_table.launches(short, architecture)
    far = dataclasses.replace(compile_table._BASE, slot="sel", seq_len=2**18)  # offsets of 64 bits
    yield from compile_table.launches(far, architecture)
    for rows in (1, 4):
        request = dataclasses.replace(
            compile_table._BASE,
            phase="decode",
            needs_grad=False,
            batch=32,
            seq_len=65536,
            page_size=128,
        )
        yield from compile_table.step_launches(request, architecture, rows)


def distinct_launches(architecture: int) -> Iterator:
    """One launch of each kernel for each combination of its flags and of tensors that are given."""
    seen = set()
    for launch in all_launches(architecture):
        flags = [
            (k, str(v))
            for k, v in sorted(launch.constexprs.items())
            if v is None or isinstance(v, bool)
        ]
        key = (launch.name, *flags)
        if key not in seen:
            seen.add(key)
            yield launch


@triton.jit(do_not_specialize=["plain"])
def method_on_argument(OUT, number, plain, wide: tl.int64):
    tl.store(OUT, number.to(tl.int64) + plain.to(tl.int64) + wide.to(tl.int64))


def test_method_call_on_a_constant_fails_to_translate() -> None:
    """with_values makes 1 a constant only where Triton specializes the argument."""
    with offline.recording(90) as made:
        method_on_argument[(1,)](torch.empty(1, dtype=torch.int64, device="meta"), 5, 1, 1)
    (launch,) = made
    assert offline.specialized_integers(launch) == ("number", "wide")
    for values in ({}, {"number": 16}, {"number": 2**40}, {"plain": 1, "wide": 1}):
        offline.translate(offline.with_values(launch, values))
    with pytest.raises(triton.CompilationError, match="has no attribute 'to'"):
        offline.translate(offline.with_values(launch, {"number": 1}))
    aligned = offline.with_values(launch, {"number": 16, "plain": 16})
    assert aligned.attributes[1,] == [["tt.divisibility", 16]]
    assert (2,) not in aligned.attributes


@triton.jit(do_not_specialize=["pair"])
def method_on_tuple_element(OUT, pair):
    tl.store(OUT, pair[0].to(tl.int64) + pair[1])


def test_elements_of_a_tuple_are_specialized() -> None:
    """Triton specializes each element of a tuple and ignores do_not_specialize for the tuple."""
    with offline.recording(90) as made:
        method_on_tuple_element[(1,)](torch.empty(1, dtype=torch.int64, device="meta"), (5, 32))
    (launch,) = made
    assert offline.specialized_integers(launch) == ("pair[0]", "pair[1]")
    for values in ({}, {"pair[0]": 2**40}, {"pair[1]": 1}, {"pair[0]": 16, "pair[1]": 3}):
        changed = offline.with_values(launch, values)
        offline.translate(changed)
        assert set(offline.specialized_integers(changed)) == {"pair[0]", "pair[1]"}
        for place, label, value in (((1, 0), "pair[0]", 5), ((1, 1), "pair[1]", 32)):
            value = values.get(label, value)
            marks = [] if value % 16 else [["tt.divisibility", 16]]
            assert changed.attributes.get(place, []) == marks
            assert (place in changed.constexprs) == (value == 1)
    with pytest.raises(triton.CompilationError, match="has no attribute 'to'"):
        offline.translate(offline.with_values(launch, {"pair[0]": 1}))


@pytest.mark.slow
def test_every_kernel_translates_with_all_integers_one() -> None:
    """Translate each kernel for sm_90 with all its specialized integer arguments equal to 1."""
    names = set()
    for launch in distinct_launches(90):
        names.add(launch.name)
        ones = dict.fromkeys(offline.specialized_integers(launch), 1)
        offline.translate(offline.with_values(launch, ones))
    printed = {row.launch.name for row in compile_table.rows({"bfloat16": ((128, 128),)})}
    assert names >= printed


@pytest.mark.few_cases("4")
@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8])
def test_sel_translates_with_one_kv_head(heads: int) -> None:
    """Small groups take the path over buckets."""
    request = dataclasses.replace(
        compile_table._BASE, slot="sel", n_heads=heads, n_kv_heads=1, seq_len=16384
    )
    launches = compile_table.launches(request, 90)
    assert {launch.name for launch in launches} >= BUCKETS
    for launch in launches:
        offline.translate(launch)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_kernels_compile_with_each_and_all_integers_specialized(architecture: int) -> None:
    """Translate with each argument equal to 1; compile with all of them 1, and all of them 16."""
    for launch in distinct_launches(architecture):
        names = offline.specialized_integers(launch)
        for name in names:
            offline.translate(offline.with_values(launch, {name: 1}))
        for value in (1, 16) if names else ():
            cost = offline.cost(offline.with_values(launch, dict.fromkeys(names, value)))
            assert cost.shared <= offline.SHARED[architecture], (launch.name, value)


@pytest.mark.parametrize("architecture", [80, 90])
def test_nsa_verify_reaches_every_kernel(architecture: int) -> None:
    """The full preset launches each prefill kernel, also those of long calls of small groups."""
    reached: set[str] = set()
    for slot in SLOTS:
        drawn = (x.case(str(x)) for x in draw(slot, "quick", ("bfloat16",)))
        for case, deterministic in itertools.product((*full_cases(), *drawn), (False, True)):
            point = Point(case, "bfloat16", deterministic)
            request = point.request(slot, "cuda", divmod(architecture, 10), needs_grad=True)
            if not configs.missing(request, architecture):
                reached |= {x.name for x in compile_table.launches(request, architecture)}
                if slot == "cmp":
                    reached |= {x.name for x in compile_table.core_launches(request, architecture)}
    rows = json.loads(compile_table.FILE.read_text())["rows"]
    kernels = {row["kernel"] for row in rows if not row["slot"].startswith("step")}
    assert kernels - reached == set()
