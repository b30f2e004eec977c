"""Open a corpus by its name: files, folders, data sets of Hugging Face, Python's documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from nsa_core.errors import InvalidInput
from nsa_core.util.extras import require_module
from nsa_core.util.text import describe_error
from nsa_models.lm.corpus import Corpus, FileCorpus, ListCorpus, field_of, is_text

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu:sample-10BT"


def open_corpus(data: str, field: str = "text", seed: int = 0) -> Corpus:
    """Open a corpus.

    A text file of more than 32 KiB is split into documents of 16 to 32 KiB, at blank lines if
    possible. A folder gives all its text, JSONL and parquet files, except hidden ones.

    Args:
        data: A file, a folder, ``python-docs``, ``fineweb-edu`` or ``hf:NAME[:CONFIG]``.
        field: Name of the text field of JSONL, parquet and Hugging Face rows.
        seed: Seed of the document order.

    Raises:
        InvalidInput: The data does not exist, or contains no supported file.
        BackendUnavailable: A required library is not installed.
    """
    if data == "python-docs":
        from nsa_bench.python_docs import library_documents

        return ListCorpus(library_documents(), data, seed)
    if data == "fineweb-edu" or data.startswith("hf:"):
        name = FINEWEB_EDU if data == "fineweb-edu" else data.removeprefix("hf:")
        return _open_hub(name, field, seed)
    path = Path(data)
    if not path.exists():
        raise InvalidInput(
            f"--data {data}: no such file or folder; give an existing path, python-docs,"
            " fineweb-edu or hf:NAME"
        )
    paths = [path]
    if path.is_dir():
        visible_paths = (
            p
            for p in sorted(path.rglob("*"))
            if not any(part[0] == "." for part in p.relative_to(path).parts)
        )
        paths = [
            p
            for p in visible_paths
            if p.is_file() and (p.suffix.lower() == ".parquet" or is_text(p))
        ]
    elif path.suffix.lower() != ".parquet" and not is_text(path):
        raise InvalidInput(f"{path} is not a UTF-8 text, JSONL or parquet file")
    if not paths:
        raise InvalidInput(f"{path} contains no text, JSONL or parquet file")
    return FileCorpus(paths, path.name, field, seed)


def _open_hub(name: str, field: str, seed: int) -> Corpus:
    """Open the split ``train`` of a data set.

    If its files are parquet, nothing is downloaded in advance: the footers of the files say which
    rows each row group has, and a row group is read when its turn comes. Otherwise `datasets`
    downloads the data set and keeps it as Arrow tables on the disk, whose rows are read at random.

    Args:
        name: NAME or NAME:CONFIG, where NAME is a name on the Hub or a local folder.
        field: Name of the text field.
        seed: Seed of the order.

    Raises:
        InvalidInput: The data set cannot be opened, or has no split ``train``.
        BackendUnavailable: `datasets` is not installed.
    """
    library = require_module("datasets", "Hugging Face data sets need", "nsa-models[train]")
    path, _, part = name.partition(":")
    try:
        builder = library.load_dataset_builder(path, part or None)
        files = builder.config.data_files or {}
        urls = [str(url) for url in files.get("train", [])]
        if urls and all(url.endswith(".parquet") for url in urls):
            return FileCorpus(urls, name, field, seed)
        table = library.load_dataset(path, part or None, split="train")
    except (OSError, ValueError, RuntimeError, LookupError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"data set {name} cannot be opened: {describe_error(error)}") from error
    return ListCorpus(_Column(table, field, name), name, seed)


class _Column(Sequence[str]):
    """The texts of a table of `datasets`, which stays on the disk."""

    def __init__(self, table: Any, field: str, name: str) -> None:
        self._table, self._field, self._name = table, field, name

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        return field_of(self._table[index], self._field, f"{self._name}, row {index + 1}")
