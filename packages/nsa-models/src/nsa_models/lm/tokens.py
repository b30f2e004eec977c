"""Tokenizers: UTF-8 bytes, or a tokenizer.json of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nsa_core.errors import InvalidInput
from nsa_core.util.extras import require_module
from nsa_core.util.text import describe_error

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """The interface that training and generation need."""

    vocab_size: int
    end: int  # the token before and after each document

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, never including ``end``."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without ``end``."""
        ...

    def to_dict(self) -> dict[str, str]:
        """Return the values for :func:`tokenizer_from_dict`, which a checkpoint stores."""
        ...


class ByteTokenizer:
    """UTF-8 bytes. The end of a document is 0xFF, which UTF-8 never uses."""

    vocab_size, end = 256, 0xFF

    def encode(self, text: str) -> list[int]:
        """Return one id per byte."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i != self.end).decode("utf-8", errors="replace")

    def to_dict(self) -> dict[str, str]:
        """Return the kind, which is all that a checkpoint needs."""
        return {"kind": "bytes"}


class FileTokenizer:
    """A tokenizer.json of Hugging Face's `tokenizers`.

    The end of a document is the file's end-of-text token, or a new id after the last one. The
    vocabulary size is rounded up to a multiple of 64, which is efficient for matrix products.
    """

    def __init__(self, content: str, name: str = "the tokenizer") -> None:
        library = require_module("tokenizers", "a tokenizer.json needs", "nsa-models[train]")
        self._content = content
        try:
            self._tokenizer: Any = library.Tokenizer.from_str(content)
        except Exception as error:  # the library raises plain Exception
            raise InvalidInput(
                f"{name} cannot be read as a tokenizer.json: {describe_error(error)}"
            ) from error
        count = self._tokenizer.get_vocab_size(with_added_tokens=True)
        end_ids = [self._tokenizer.token_to_id(word) for word in _ENDS]
        self.end: int = next((i for i in end_ids if i is not None), count)
        self.vocab_size: int = -(-max(count, self.end + 1) // 64) * 64

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without the special tokens that the file adds around it."""
        text = text.encode("utf-8", errors="replace").decode()  # it takes no lone surrogates
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [i for i in ids if i != self.end]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        count = self._tokenizer.get_vocab_size(with_added_tokens=True)
        text: str = self._tokenizer.decode([i for i in ids if i < count and i != self.end])
        return text

    def to_dict(self) -> dict[str, str]:
        """Return the content of the file."""
        return {"kind": "tokenizers", "json": self._content}


def tokenizer_from_dict(values: Mapping[str, str]) -> Tokenizer:
    """Build a tokenizer from the values of ``to_dict``.

    Raises:
        InvalidInput: The kind is unknown.
        BackendUnavailable: `tokenizers` is not installed.
    """
    if values.get("kind") == "bytes":
        return ByteTokenizer()
    if values.get("kind") == "tokenizers":
        return FileTokenizer(values["json"])
    raise InvalidInput(f"tokenizer kind must be bytes or tokenizers, got {values.get('kind')!r}")


def read_tokenizer(path: str | Path) -> FileTokenizer:
    """Read a tokenizer.json.

    Raises:
        InvalidInput: The file cannot be read, or is not a tokenizer.json.
        BackendUnavailable: `tokenizers` is not installed.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {describe_error(error)}") from error
    return FileTokenizer(content, str(path))
