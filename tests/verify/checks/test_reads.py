"""The counted reads equal the prediction; one token too many or too few is found."""

from __future__ import annotations

import killers
import pytest
import torch

from nsa_verify.checks import reads
from nsa_verify.checks.reads import count_reads
from nsa_verify.problems.cases import PAPER, TINY, config_of
from toy_forms import subject

CONFIG = config_of(4, 2, 16, 16, TINY)  # l=8 d=4 l'=16 n=4 w=24


def predicted_total(config, length):
    """Predict the tokens that a step reads for one kv head, if it selects its current block.

    This is the exact form of the paper's S/d + n*l' + w.
    """
    geometry, t = config.geometry, length - 1
    block = geometry.select_block_size
    selected = min(geometry.num_selected_blocks, t // block + 1)
    in_blocks = (selected - 1) * block + t % block + 1
    return geometry.num_compressed(length) + in_blocks + min(geometry.window_size, length)


@pytest.mark.few_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [1, 7, 8, 11, 12, 17, 24, 25, 77])
def test_counted_reads_equal_the_prediction(length, dtype, monkeypatch):
    monkeypatch.setattr(reads, "CHUNK", 50)
    entries = list(count_reads(subject(), CONFIG, length, dtype))
    assert [(r.branch, r.kv_head) for r in entries] == [
        (b, g) for b in ("cmp", "sel", "win") for g in (0, 1)
    ]
    for entry in entries:
        assert not entry.difference, entry
        assert entry.predicted == entry.values == entry.keys
    predicted = {r.branch: len(r.predicted) for r in entries}
    assert predicted["cmp"] == max(0, (length - 8) // 4 + 1)
    assert predicted["win"] == min(24, length)
    assert sum(predicted.values()) == predicted_total(CONFIG, length)


def test_prediction_is_one_below_table_4_of_the_paper():
    table = {8192: 2048, 16384: 2560, 32768: 3584, 65536: 5632}
    config = config_of(4, 2, 16, 16, PAPER)
    for length, bound in table.items():
        assert predicted_total(config, length) == bound - 1


FAULTS = (
    ("win", "win_one_more", 25, "1 token(s) too many [44], 0 too few"),
    ("win", "win_one_fewer", 23, "0 token(s) too many [], 1 too few [45]"),
    ("cmp", "cmp_one_more", 17, "1 token(s) too many [16], 0 too few"),
    ("sel", "sel_one_more", 54, "1 token(s) too many [69], 0 too few"),
    ("sel", "sel_one_fewer", 52, "0 token(s) too many [], 1 too few [68]"),
)


@pytest.mark.parametrize(("slot", "form", "count", "detail"), FAULTS)
def test_one_token_too_many_or_too_few_is_found(slot, form, count, detail):
    entries = [
        r
        for r in count_reads(subject(**{slot: form}), CONFIG, 69, torch.float32)
        if r.branch == slot
    ]
    assert [(len(r.values), len(r.keys)) for r in entries] == [(count, count)] * 2
    assert f"values of {detail}" in entries[0].difference
    assert f"keys of {detail}" in entries[0].difference
    killers.expect("decode reads", form, f"decode reads, {slot}")


def test_keys_and_values_are_counted_separately():
    entries = [
        r
        for r in count_reads(subject(sel="sel_with_an_unread_key"), CONFIG, 30, torch.float32)
        if r.branch == "sel"
    ]
    assert [(len(r.values), len(r.keys)) for r in entries] == [(30, 28)] * 2
    assert entries[0].difference
