"""DataSpec: what a run trains on, in words that a checkpoint keeps; and the rows those words stand
for.
"""

from __future__ import annotations

import dataclasses
import itertools

from nsa_core.errors import InvalidInput
from nsa_models.lm.corpus import open_corpus
from nsa_models.lm.data import Row, Rows, TextRows
from nsa_models.lm.synthetic import RecallRows, SyntheticRows, UniformRows
from nsa_models.lm.tokens import ByteTokenizer, Tokenizer

TASKS: dict[str, type[SyntheticRows]] = {"uniform": UniformRows, "recall": RecallRows}


@dataclasses.dataclass(frozen=True)
class DataSpec:
    """``data`` is a task of TASKS or a name that :func:`nsa_models.lm.corpus.open_corpus` takes.

    Raises:
        InvalidInput: a field is out of range; all offending fields are named with their values.
    """

    data: str
    length: int = 256  # tokens a row
    text_field: str = "text"
    held_out: float = 0.05  # share of the documents, by a hash of their text
    seed: int = 0
    vocab_size: int = 64  # of a task; text has its tokenizer's
    held_out_rows: int = 64  # at most, which the held-out loss is taken over

    def __post_init__(self) -> None:
        wrong = []
        for name, least in (("length", 2), ("vocab_size", 2), ("held_out_rows", 1)):
            if getattr(self, name) < least:
                wrong.append(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            wrong.append(f"seed must lie in [0, 2^63), got {self.seed}")
        if not 0 < self.held_out < 1:
            wrong.append(f"held_out must lie between 0 and 1, got {self.held_out}")
        if wrong:
            raise InvalidInput("; ".join(wrong))


@dataclasses.dataclass
class Data:
    """Rows to train on, and rows that are never trained on."""

    spec: DataSpec
    rows: Rows
    held_out: list[Row]
    vocab_size: int
    tokenizer: Tokenizer | None = None  # None: a task


def open_data(spec: DataSpec, tokenizer: Tokenizer | None = None) -> Data:
    """The rows of ``spec``: text by ``tokenizer``, bytes where there is none.

    Raises:
        InvalidInput: there is no such data, or too little for both sides of the split.
        BackendUnavailable: a library that it needs is not installed.
    """
    if spec.data in TASKS:
        task = TASKS[spec.data]
        rows: Rows = task(spec.vocab_size, spec.length, seed=spec.seed)
        apart = task(spec.vocab_size, spec.length, seed=spec.seed, held_out=True)
        return Data(spec, rows, [next(apart) for _ in range(spec.held_out_rows)], spec.vocab_size)
    tokenizer = tokenizer or ByteTokenizer()
    corpus = open_corpus(spec.data, spec.text_field, spec.seed)
    rows = text = TextRows(corpus, tokenizer, spec.length, share=spec.held_out)
    text.begin()
    kept = TextRows(corpus, tokenizer, spec.length, held_out=True, share=spec.held_out, epochs=1)
    return Data(
        spec,
        rows,
        list(itertools.islice(kept, spec.held_out_rows)),
        tokenizer.vocab_size,
        tokenizer,
    )
