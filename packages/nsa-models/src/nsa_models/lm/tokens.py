"""Tokenizers: UTF-8 bytes, or a tokenizer.json of Hugging Face."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nsa_core.errors import InvalidInput
from nsa_core.util.extras import require_module
from nsa_core.util.text import describe_error

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
END = "<|endoftext|>"  # the name of the token between documents, if the tokenizer has none
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")


class ByteTokenizer:
    """UTF-8 bytes. The end of a document is 0xFF, which UTF-8 never uses.

    Attributes:
        vocab_size: Number of ids.
        end: The token before and after each document.
        kind: "bytes".
    """

    vocab_size, end, kind = 256, 0xFF, "bytes"

    def encode(self, text: str) -> list[int]:
        """Return one id per byte, never ``end``."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without ``end``; invalid UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i != self.end).decode("utf-8", errors="replace")

    def files(self) -> dict[str, str]:
        """Return the text of tokenizer.json and tokenizer_config.json, as transformers reads them.

        There the token between documents begins and ends a text, but is not added to a text.
        """
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        vocabulary = {character: byte for byte, character in enumerate(_byte_characters()[:-1])}
        content = {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {**level, "use_regex": False},
            "decoder": {**level, "use_regex": True},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
        return _files(content, END, self.end)


@contextlib.contextmanager
def encoding() -> Iterator[None]:
    """Turn an error of the library `tokenizers`, a plain Exception, into InvalidInput."""
    try:
        yield
    except Exception as error:
        raise InvalidInput(
            f"{TOKENIZER} cannot encode the text: {describe_error(error)}; give a model whose"
            " tokenizer knows all characters"
        ) from error


class FileTokenizer:
    """A tokenizer.json of Hugging Face's `tokenizers`.

    The end of a document is the file's end-of-text token, or a new id after the last one. The
    vocabulary size is rounded up to a multiple of 64, which is efficient for matrix products.

    Args:
        content: The text of the file.
        name: The name of the file, for errors.
        end: The token between documents; None: as above.

    Attributes:
        vocab_size, end, kind: As of ByteTokenizer; the kind is "file".
        ids: Number of ids, from 0 to the largest one.
        library: The tokenizer of the library `tokenizers`.
    """

    kind = "file"

    def __init__(self, content: str, name: str = "the tokenizer", end: int | None = None) -> None:
        library = require_module("tokenizers", "a tokenizer.json needs", "nsa-models[train]")
        self._content = content
        try:
            self.library: Any = library.Tokenizer.from_str(content)
        except Exception as error:  # the library raises plain Exception
            raise InvalidInput(
                f"{name} cannot be read as a tokenizer.json: {describe_error(error)}; use the"
                f" {TOKENIZER} of a model"
            ) from error
        added = {token.content for token in self.library.get_added_tokens_decoder().values()}
        if self.library.get_vocab(with_added_tokens=False).keys() <= added:
            raise InvalidInput(
                f"{name} has no vocabulary, so every text is nothing; use the {TOKENIZER} of a"
                " model"
            )
        self.library.no_truncation()  # a file may ask for it
        self.library.no_padding()
        used = self.library.get_vocab(with_added_tokens=True).values()
        count = max(used, default=-1) + 1
        end_ids = [end, *(self.library.token_to_id(word) for word in _ENDS)]
        self.end: int = next((i for i in end_ids if i is not None), count)
        self.ids = max(count, self.end + 1)
        self.vocab_size: int = -(-self.ids // 64) * 64

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without the special tokens that the file adds around it.

        Raises:
            InvalidInput: The tokenizer has no id for a part of the text.
        """
        text = text.encode("utf-8", errors="replace").decode()  # it takes no lone surrogates
        with encoding():
            ids = self.library.encode(text, add_special_tokens=False).ids
        return [i for i in ids if i != self.end]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        count = self.library.get_vocab_size(with_added_tokens=True)
        text: str = self.library.decode([i for i in ids if i < count and i != self.end])
        return text

    def files(self) -> dict[str, str]:
        """See :meth:`ByteTokenizer.files`."""
        word = self.library.id_to_token(self.end)
        return _files(json.loads(self._content), word or END, self.end)


Tokenizer = ByteTokenizer | FileTokenizer


def _byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in a tokenizer.json (GPT-2)."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]


def _files(content: dict[str, Any], end: str, number: int) -> dict[str, str]:
    """Return the texts of the two files, with the token between documents."""
    added = content.get("added_tokens") or []
    if not any(token.get("content") == end for token in added):
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = [*added, {"id": number, "content": end, **plain, "special": True}]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }
    files = {TOKENIZER: {**content, "added_tokens": added}, TOKENIZER_CONFIG: config}
    texts = {name: json.dumps(file, indent=2, ensure_ascii=False) for name, file in files.items()}
    return {name: text + "\n" for name, text in texts.items()}


def read_tokenizer(path: str | Path) -> FileTokenizer:
    """Read a tokenizer.json.

    Raises:
        InvalidInput: The file cannot be read, or is not a tokenizer.json with a vocabulary.
        BackendUnavailable: `tokenizers` is not installed.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {describe_error(error)}") from error
    return FileTokenizer(content, str(path))
