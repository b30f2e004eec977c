"""Rows: every token once per epoch, document boundaries, a strict split, a resumable position."""

from __future__ import annotations

import collections
import itertools
import json
import math
import re

import pytest
import torch

from nsa_core import InvalidInput
from nsa_models.lm.corpus import Corpus
from nsa_models.lm.data import (
    Row,
    TextRows,
    batch_of,
    is_held_out,
    share_for,
    unigram_entropy,
)
from nsa_models.lm.model import IGNORED
from nsa_models.lm.synthetic import RecallRows, UniformRows
from nsa_models.lm.tokens import ByteTokenizer

END = ByteTokenizer.end
SHARE = 0.3


def parts_of(row: Row):
    """Return (tokens, targets) of each document of a row."""
    ends = [0, *itertools.accumulate(row.documents)]
    assert ends[-1] == len(row.tokens) == len(row.targets)
    return [(row.tokens[a:b], row.targets[a:b]) for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("length", [2, 16, 37, 64, 1000])
def test_every_token_is_a_target_once_per_epoch(rows, documents, length):
    stream = [
        r for held in (False, True) for r in rows(length, held_out=held, share=SHARE, epochs=1)
    ]
    counted = collections.Counter(t for row in stream for t in row.targets)
    unused = counted.pop(IGNORED)
    expected = collections.Counter(b for text in documents for b in text.encode())
    expected[END] = len(documents)
    assert counted == expected
    assert sum(counted.values()) + unused == length * len(stream)
    assert unused < 2 * length  # less than one row per side of the split


def test_joined_rows_are_the_documents(rows, documents):
    """Each part of a row begins at END or where the previous part of its document was cut."""
    texts, current = [], []
    for row in rows(16, share=SHARE, epochs=1):
        assert all(n >= 1 for n in row.documents)
        for tokens, targets in parts_of(row):
            if targets[0] == IGNORED:
                continue
            assert tokens[1:] == targets[:-1]
            assert (tokens[0] == END) == (not current)
            if current:
                assert tokens[0] == current[-1]
            current += targets
            if targets[-1] == END:
                texts.append(bytes(current[:-1]).decode())
                current = []
    assert not current
    assert sorted(texts) == sorted(t for t in documents if not is_held_out(t, SHARE))


def test_unigram_entropy_of_two_rows():
    rows = [Row([0] * 4, [1, 2, 1, IGNORED], [4]), Row([0], [3], [1])]
    assert unigram_entropy(rows) == pytest.approx(1.5 * math.log(2))


def test_no_document_is_on_both_sides_of_the_split(rows, documents):
    sides = [{t for t in documents if is_held_out(t, SHARE) == held} for held in (False, True)]
    assert all(sides)
    copies = Corpus(documents + documents, "copies")
    for held, side in enumerate(sides):
        stream = TextRows(copies, ByteTokenizer(), 4000, held_out=bool(held), share=SHARE, epochs=1)
        content = bytes(t for row in stream for t in row.targets if t not in (IGNORED, END))
        assert sum(len(t.encode()) for t in side) * 2 == len(content)
    assert abs(sum(is_held_out(str(n), 0.1) for n in range(5000)) - 500) < 100


@pytest.mark.parametrize("make", ["text", "uniform", "recall"])
def test_a_stream_resumes_from_any_position(rows, make):
    def stream():
        return {
            "text": lambda: rows(20, share=SHARE),
            "uniform": lambda: UniformRows(32, 20),
            "recall": lambda: RecallRows(32, 20),
        }[make]()

    reference = stream()
    expected = [next(reference) for _ in range(250)]
    if make == "text":
        assert reference.state_dict()["epoch"] == 1  # no target is left out between two epochs
        assert all(IGNORED not in row.targets for row in expected)
    first = stream()
    for number in range(249):
        second = stream()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert next(second) == next(first) == expected[number]
        assert second.state_dict() == first.state_dict()
        if number == 100:
            assert [next(second) for _ in range(101, 250)] == expected[101:]


def test_a_lane_without_documents_in_an_epoch_goes_on_in_the_next():
    rows = TextRows(Corpus(["one", "two"], "small"), ByteTokenizer(), 4)
    lanes = [rows.lane(number, 5) for number in range(5)]
    assert all(next(lane) for lane in lanes)
    assert {lane.state_dict()["epoch"] for lane in lanes} > {0}


def test_a_split_side_without_documents_is_refused():
    corpus, two = Corpus(["only this"], "one"), Corpus(["only this", "and that"], "two")
    single = "one is one document, and training needs two, one of them held out: give more doc"
    assert not is_held_out("only this", 0.05)
    with pytest.raises(InvalidInput, match=single):
        next(TextRows(corpus, ByteTokenizer(), 8, held_out=True))
    with pytest.raises(InvalidInput, match=single):
        TextRows(corpus, ByteTokenizer(), 8, share=0.999999).begin()
    for held_out, share, side in ((True, 1e-9, "held out"), (False, 0.999999, "left")):
        message = (
            rf"none of the 2 documents of two is {side}; held_out .* such as ([\d.]+), or give"
        )
        with pytest.raises(InvalidInput, match=message) as refused:
            next(TextRows(two, ByteTokenizer(), 8, held_out=held_out, share=share))
        enough = float(re.search(message, str(refused.value))[1])
        for each in (True, False):
            next(TextRows(two, ByteTokenizer(), 8, held_out=each, share=enough))
    with pytest.raises(InvalidInput, match="empty contains no text"):
        next(TextRows(Corpus(["", ""], "empty"), ByteTokenizer(), 8))
    resumed = TextRows(corpus, ByteTokenizer(), 8, held_out=True)
    resumed.load_state_dict({"epoch": 3, "document": 7, "offset": 0})
    with pytest.raises(InvalidInput, match=single):
        next(resumed)
    with pytest.raises(InvalidInput, match="length must be an integer >= 2, got 1"):
        TextRows(corpus, ByteTokenizer(), 1)


def test_one_of_few_documents_is_held_out():
    few, many = [f"text {n}" for n in range(9)], [f"text {n}" for n in range(129)]
    for texts in (few, few + few, ["", *few]):
        share = share_for(Corpus(texts, "few"), 1e-9)
        assert len({text for text in filter(None, texts) if is_held_out(text, share)}) == 1
    assert share_for(Corpus(few, "few"), 0.5) == 0.5
    for texts in (many, few[:1], few[:1] * 2, [""]):
        assert share_for(Corpus(texts, "unchanged"), 1e-9) == 1e-9


def test_a_packed_batch_has_document_boundaries():
    rows = [Row([1, 2, 3, 4], [2, 3, 4, IGNORED], [3, 1]), Row([5, 6, 7, 8], [6, 7, 8, 9], [4])]
    packed = batch_of(rows, packed=True)
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 8, 8, 8, 8, 8, 8]
    assert packed.cu_seqlens.dtype == torch.int32
    assert (packed.max_seqlen, packed.counted) == (4, 7)
    assert packed.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    plain = batch_of(rows, packed=False)
    assert plain.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert (plain.cu_seqlens, plain.max_seqlen, plain.counted) == (None, None, 7)
    many = batch_of([Row([0] * 9, [0] * 9, [1] * 9)], packed=True)
    assert len(many.cu_seqlens) == 17


def test_uniform_rows_never_repeat_and_are_uniform():
    train, held_out = UniformRows(8, 50), UniformRows(8, 50, held_out=True)
    rows = [next(train) for _ in range(60)] + [next(held_out) for _ in range(60)]
    assert len({tuple(row.tokens) for row in rows}) == 120
    assert all(row.tokens[1:] == row.targets[:-1] for row in rows)
    counts = torch.tensor([t for row in rows for t in row.targets]).bincount(minlength=8)
    assert (counts - 750).abs().max() < 130  # five standard deviations
    assert UniformRows(8, 50, seed=1).__next__() != UniformRows(8, 50).__next__()


def test_recall_targets_are_the_values_of_the_queried_keys():
    row = next(RecallRows(32, 24))
    keys, values = row.tokens[0:12:2], row.tokens[1:12:2]
    assert len(set(keys)) == 6
    assert max(keys) < 16 <= min(values)
    value_of = dict(zip(keys, values))
    assert row.tokens[12::2] != keys  # in another order
    assert sorted(row.tokens[12::2]) == sorted(keys)
    assert row.targets[12::2] == [value_of[key] for key in row.tokens[12::2]]
    assert set(row.targets[:12] + row.targets[13::2]) == {IGNORED}
    with pytest.raises(InvalidInput, match="multiple of 4 for recall, got 10"):
        RecallRows(32, 10)
    with pytest.raises(InvalidInput, match="at least 40 for rows of 80 tokens, which have 20"):
        RecallRows(32, 80)
