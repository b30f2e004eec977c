"""DataSpec: the description of training data in a checkpoint, and the rows that it describes."""

from __future__ import annotations

import dataclasses
import itertools

from nsa_core.errors import InvalidInput
from nsa_models.lm.data import Row, Rows, TextRows
from nsa_models.lm.sources import open_corpus
from nsa_models.lm.synthetic import RecallRows, SyntheticRows, UniformRows
from nsa_models.lm.tokens import ByteTokenizer, Tokenizer

TASKS: dict[str, type[SyntheticRows]] = {"uniform": UniformRows, "recall": RecallRows}


@dataclasses.dataclass(frozen=True)
class DataSpec:
    """A description of training data.

    Attributes:
        data: A task in TASKS, or data that :func:`nsa_models.lm.sources.open_corpus` accepts.
        length: Tokens per row.
        text_field: Name of the text field of JSONL, parquet and Hugging Face rows.
        held_out: Share of held-out documents, chosen by a hash of their text.
        seed: Seed of the data.
        vocab_size: Vocabulary of a task; text has its tokenizer's.
        held_out_rows: Maximum number of rows for the held-out loss.

    Raises:
        InvalidInput: A field is out of range; the message names every such field and its value.
    """

    data: str
    length: int = 256
    text_field: str = "text"
    held_out: float = 0.05
    seed: int = 0
    vocab_size: int = 64
    held_out_rows: int = 64

    def __post_init__(self) -> None:
        errors = []
        for name, minimum in (("length", 2), ("vocab_size", 2), ("held_out_rows", 1)):
            if getattr(self, name) < minimum:
                errors.append(f"{name} must be at least {minimum}, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            errors.append(f"seed must lie in [0, 2^63), got {self.seed}")
        if not 0 < self.held_out < 1:
            errors.append(f"held_out must lie between 0 and 1, got {self.held_out}")
        if errors:
            raise InvalidInput("; ".join(errors))


@dataclasses.dataclass
class Data:
    """Training rows and held-out rows."""

    spec: DataSpec
    rows: Rows
    held_out: list[Row]
    vocab_size: int
    tokenizer: Tokenizer | None = None  # None for a task


def open_data(spec: DataSpec, tokenizer: Tokenizer | None = None) -> Data:
    """Open the data of a description.

    Args:
        spec: The description.
        tokenizer: Tokenizer of text; None for bytes.

    Raises:
        InvalidInput: The data does not exist, or is too small for both sides of the split.
        BackendUnavailable: A required library is not installed.
    """
    if spec.data in TASKS:
        task = TASKS[spec.data]
        rows: Rows = task(spec.vocab_size, spec.length, seed=spec.seed)
        held_out = task(spec.vocab_size, spec.length, seed=spec.seed, held_out=True)
        return Data(
            spec, rows, [next(held_out) for _ in range(spec.held_out_rows)], spec.vocab_size
        )
    tokenizer = tokenizer or ByteTokenizer()
    corpus = open_corpus(spec.data, spec.text_field, spec.seed)
    rows = text = TextRows(corpus, tokenizer, spec.length, share=spec.held_out)
    text.begin()
    held_out_text = TextRows(
        corpus, tokenizer, spec.length, held_out=True, share=spec.held_out, epochs=1
    )
    return Data(
        spec,
        rows,
        list(itertools.islice(held_out_text, spec.held_out_rows)),
        tokenizer.vocab_size,
        tokenizer,
    )
