"""Text to token ids and back: bytes, or a tokenizer in Hugging Face's tokenizer.json format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nsa_core.errors import InvalidInput
from nsa_core.util.extras import needed
from nsa_core.util.text import describe_error

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """What training and generation ask of a tokenizer."""

    vocab_size: int
    end: int  # stands before and after each document

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; ``end`` is not among them."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; ``end`` is left out."""
        ...

    def to_dict(self) -> dict[str, str]:
        """Everything :func:`tokenizer_from_dict` needs, for a checkpoint."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8. 0xFF, which UTF-8 never uses, is the end of a document."""

    vocab_size, end = 256, 0xFF

    def encode(self, text: str) -> list[int]:
        """One id a byte."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i != self.end).decode("utf-8", errors="replace")

    def to_dict(self) -> dict[str, str]:
        """There is nothing to keep but the kind."""
        return {"kind": "bytes"}


class FileTokenizer:
    """A tokenizer.json of Hugging Face's `tokenizers`.

    The end of a document is the special token of that name which the file has, or one more id than
    it has. The vocabulary is rounded up to a multiple of 64, as matrix units want it.
    """

    def __init__(self, content: str, name: str = "the tokenizer") -> None:
        library = needed("tokenizers", "a tokenizer.json needs", "nsa-models[train]")
        self._content = content
        try:
            self._tokenizer: Any = library.Tokenizer.from_str(content)
        except Exception as error:  # the library raises nothing narrower
            raise InvalidInput(
                f"{name} cannot be read as a tokenizer.json: {describe_error(error)}"
            ) from error
        count = self._tokenizer.get_vocab_size(with_added_tokens=True)
        found = [self._tokenizer.token_to_id(word) for word in _ENDS]
        self.end: int = next((i for i in found if i is not None), count)
        self.vocab_size: int = -(-max(count, self.end + 1) // 64) * 64

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without the tokens that the file would put around it."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [i for i in ids if i != self.end]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens left out."""
        known = self._tokenizer.get_vocab_size(with_added_tokens=True)
        text: str = self._tokenizer.decode([i for i in ids if i < known and i != self.end])
        return text

    def to_dict(self) -> dict[str, str]:
        """The whole file."""
        return {"kind": "tokenizers", "json": self._content}


def tokenizer_from_dict(values: Mapping[str, str]) -> Tokenizer:
    """Inverse of ``to_dict``.

    Raises:
        InvalidInput: of an unknown kind.
        BackendUnavailable: `tokenizers` is not installed.
    """
    if values.get("kind") == "bytes":
        return ByteTokenizer()
    if values.get("kind") == "tokenizers":
        return FileTokenizer(values["json"])
    raise InvalidInput(
        f"the kind of tokenizer must be bytes or tokenizers, got {values.get('kind')!r}"
    )


def read_tokenizer(path: str | Path) -> FileTokenizer:
    """The tokenizer in a file.

    Raises:
        InvalidInput: the file cannot be read, or is no tokenizer.json.
        BackendUnavailable: `tokenizers` is not installed.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {describe_error(error)}") from error
    return FileTokenizer(content, str(path))
