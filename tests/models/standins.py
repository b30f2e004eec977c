"""Fakes of the parts of pyarrow and tokenizers that nsa_models.lm uses."""

from __future__ import annotations

import json
import pathlib
import types
from typing import Any


class ArrowException(Exception):
    """The base of pyarrow's errors."""


class Cell:
    """A value of a column."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def as_py(self) -> Any:
        return self._value


class ParquetFile:
    """A JSON file instead of parquet: {"group": rows per group, "columns": {name: values}}."""

    def __init__(self, path: pathlib.Path) -> None:
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise ArrowException(str(error)) from error
        self._size, self._columns = content["group"], content["columns"]
        self.schema_arrow = types.SimpleNamespace(names=list(self._columns))
        self._count = len(next(iter(self._columns.values())))
        self.num_row_groups = -(-self._count // self._size)
        self.metadata = self

    def row_group(self, group: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(num_rows=min(self._size, self._count - group * self._size))

    def read_row_group(self, group: int, columns: list[str]) -> types.SimpleNamespace:
        rows = slice(group * self._size, (group + 1) * self._size)
        return types.SimpleNamespace(
            column=lambda i: [Cell(v) for v in self._columns[columns[i]][rows]]
        )


class Tokenizer:
    """A tokenizer of whole words."""

    def __init__(self, words: dict[str, int]) -> None:
        self._words = words

    @classmethod
    def from_str(cls, content: str) -> Tokenizer:
        return cls(json.loads(content)["model"]["vocab"])

    def get_vocab_size(self, with_added_tokens: bool) -> int:
        return len(self._words)

    def token_to_id(self, word: str) -> int | None:
        return self._words.get(word)

    def encode(self, text: str, add_special_tokens: bool) -> types.SimpleNamespace:
        assert not add_special_tokens
        return types.SimpleNamespace(ids=[self._words.get(word, 0) for word in text.split()])

    def decode(self, ids: list[int]) -> str:
        words = {number: word for word, number in self._words.items()}
        return " ".join(words[i] for i in ids)
