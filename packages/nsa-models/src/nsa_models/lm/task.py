"""DataSpec: the description of training data in a checkpoint, and the rows that it describes."""

from __future__ import annotations

import dataclasses
import functools
import itertools

from nsa_core.errors import InvalidInput
from nsa_core.limits import integer_problems, shown
from nsa_models.lm.data import Row, TextRows, share_for
from nsa_models.lm.fingerprint import Fingerprint, changes
from nsa_models.lm.sources import open_corpus
from nsa_models.lm.synthetic import NumberedRows, RecallRows, SyntheticRows, UniformRows
from nsa_models.lm.tokens import ByteTokenizer, Tokenizer

Rows = TextRows | NumberedRows
TASKS: dict[str, type[SyntheticRows]] = {"uniform": UniformRows, "recall": RecallRows}


@dataclasses.dataclass(frozen=True)
class DataSpec:
    """A description of training data.

    Attributes:
        data: A task in TASKS, or data that :func:`nsa_models.lm.sources.open_corpus` accepts.
        length: Tokens per row.
        text_field: Name of the text field of JSONL, parquet and Hugging Face rows.
        held_out: Share of held-out documents, chosen by a hash of their text; of few documents, at
            least one is held out.
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
        minima = {"length": 2, "vocab_size": 2, "held_out_rows": 1, "seed": 0}
        errors = [
            problem
            for name, minimum in minima.items()
            for problem in integer_problems(name, getattr(self, name), minimum)
        ]
        if not (isinstance(self.held_out, float) and 0 < self.held_out < 1):
            errors.append(f"held_out must lie between 0 and 1, got {shown(self.held_out)}")
        errors += [
            f"{name} must be a text, got {shown(getattr(self, name))}"
            for name in ("data", "text_field")
            if not isinstance(getattr(self, name), str)
        ]
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

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the corpus, as JSON. The first use reads every byte of its files."""
        if isinstance(self.rows, TextRows):
            return self.rows.corpus.fingerprint()
        spec = self.spec
        return {spec.data: f"length {spec.length}, vocab_size {spec.vocab_size}, seed {spec.seed}"}

    def changes(self, old: Fingerprint) -> list[str]:
        """Return a sentence for each file that is not as in an old fingerprint."""
        return changes(old, self.fingerprint)


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
        rows, held_out = (
            TASKS[spec.data](spec.vocab_size, spec.length, seed=spec.seed, held_out=side)
            for side in (False, True)
        )
        held_out_rows = [next(held_out) for _ in range(spec.held_out_rows)]
        return Data(spec, rows, held_out_rows, spec.vocab_size)
    tokenizer = tokenizer or ByteTokenizer()
    corpus = open_corpus(spec.data, spec.text_field, spec.seed)
    share = share_for(corpus, spec.held_out)
    text = TextRows(corpus, tokenizer, spec.length, share=share)
    text.begin()
    held_out_text = TextRows(corpus, tokenizer, spec.length, held_out=True, share=share, epochs=1)
    held_out_rows = list(itertools.islice(held_out_text, spec.held_out_rows))
    return Data(spec, text, held_out_rows, tokenizer.vocab_size, tokenizer)
