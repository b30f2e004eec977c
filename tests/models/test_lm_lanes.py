"""Lanes: the rows of a step are the same for any number of processes, and none reads others'."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch

from nsa_core import InvalidInput
from nsa_models.lm.corpus import Corpus
from nsa_models.lm.data import TextRows
from nsa_models.lm.lanes import Lanes, Unreadable
from nsa_models.lm.model import IGNORED
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.synthetic import RecallRows
from nsa_models.lm.tokens import ByteTokenizer


class Counting(Corpus):
    """Documents that remember which of them were read."""

    def __init__(self, documents):
        super().__init__(documents, "counting")
        self.read = set()

    def epoch(self, epoch, start, lane):
        for text in super().epoch(epoch, start, lane):
            self.read.add((epoch, text))
            yield text


class Processes(World):
    """A process of several that run in turn in the test's own process."""

    def __new__(cls, *_):
        return object.__new__(cls)

    def sum_on_host(self, *values):
        return list(values)

    def collect(self, value):
        return [value]


def lanes_of(data, batch, size=1, accumulate=1):
    """Return the Lanes of each of ``size`` processes."""
    recipe = Recipe(batch=batch, accumulate=accumulate)
    worlds = [Processes(torch.device("cpu"), rank, size) for rank in range(size)]
    return [Lanes(data(), recipe, world) for world in worlds]


def step_of(processes):
    """Return the rows of a step in the order of their lanes, over all processes."""
    steps = [process.step() for process in processes]
    parts = range(len(steps[0][0]))
    return [row for part in parts for rows, _ in steps for row in rows[part]], [
        counted for _, counted in steps
    ]


@pytest.mark.parametrize("kind", ["text", "recall"])
def test_the_rows_of_a_step_do_not_depend_on_processes_or_parts(kind):
    documents = [" ".join(str(n * k) for k in range(2, n + 3)) for n in range(60)]

    def data():
        if kind == "recall":
            return RecallRows(32, 24)
        return TextRows(Corpus(documents, "words"), ByteTokenizer(), 24, share=0.2)

    reference = lanes_of(data, 8)
    expected = [step_of(reference)[0] for _ in range(12)]
    assert len({tuple(row.tokens) for rows in expected for row in rows}) > 80
    layouts = [(1, 1), (2, 1), (4, 2), (1, 4), (8, 1), (2, 2)]
    processes, position = lanes_of(data, 8), None
    for number, (size, accumulate) in enumerate(layouts):
        processes = lanes_of(data, 8, size, accumulate)
        if position is not None:
            for process in processes:
                process.load_state(json.loads(json.dumps(position)))
        for step in range(2):
            rows, counted = step_of(processes)
            assert rows == expected[2 * number + step]
            assert sum(counted) == sum(target != IGNORED for row in rows for target in row.targets)
        own = [dict(process._own_positions()) for process in processes]
        position = [{k: v for part in own for k, v in part.items()}[n] for n in range(8)]


def test_a_process_reads_and_encodes_only_the_documents_of_its_rows(monkeypatch):
    documents, encoded = [f"document {n} " * 3 for n in range(64)], []
    encode = ByteTokenizer.encode
    monkeypatch.setattr(
        ByteTokenizer, "encode", lambda self, text: encoded.append(text) or encode(self, text)
    )
    corpora = []

    def data():
        corpora.append(Counting(documents))
        rows = TextRows(corpora[-1], ByteTokenizer(), 20, share=0.2)
        rows.begin()
        corpora[-1].read.clear()
        return rows

    processes = lanes_of(data, 4, 2)
    encoded.clear()
    for _ in range(8):
        for process in processes:
            process.step()
    first, second = (corpus.read for corpus in corpora)
    assert first
    assert second
    assert not first & second
    assert len(encoded) == len(set(encoded)) <= len(first | second)


def test_a_document_that_cannot_be_read_leaves_all_positions_as_they_were(documents):
    class Broken(Corpus):
        def epoch(self, *arguments):
            for text in super().epoch(*arguments):
                if text == documents[20]:
                    raise InvalidInput("line 7 is not JSON")
                yield text

    lanes = lanes_of(lambda: TextRows(Broken(documents, "words"), ByteTokenizer(), 24), 4)[0]
    before = None
    while before != lanes.state():
        before = lanes.state()
        with contextlib.suppress(InvalidInput):
            lanes.step()
    with pytest.raises(InvalidInput, match="line 7 is not JSON"):
        lanes.step()
    assert lanes.state() == before


def test_all_processes_know_of_a_document_that_one_cannot_read(documents, monkeypatch):
    def data():
        return TextRows(Corpus(documents, "words"), ByteTokenizer(), 24, share=0.2)

    lanes = lanes_of(data, 4, 2)[0]
    before = lanes._own_positions()
    monkeypatch.setattr(Processes, "sum_on_host", lambda self, *values: [values[0], 1])
    monkeypatch.setattr(Processes, "collect", lambda self, value: [value, "line 7 is not JSON"])
    with pytest.raises(Unreadable, match="process 1 of 2: line 7 is not JSON"):
        lanes.step()
    assert lanes._own_positions() == before
    for position in (
        [],
        [{}] * 4,
        [{"row": 3}] * 4,
        [{**before[0], "epoch": "first"}] * 4,
        [3] * 4,
    ):
        with pytest.raises(InvalidInput, match="the position in the data is not one of these rows"):
            lanes.load_state(position)
    with pytest.raises(InvalidInput, match="batch 4 does not divide over accumulate 1 x 3"):
        lanes_of(data, 4, 3)
