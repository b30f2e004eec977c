"""Make the corpus of the study from Debian packages, and turn it into tokens.

    python benchmarks/study/corpus.py build FOLDER    # Debian 12, datasketch, numpy, tokenizers
    python benchmarks/study/corpus.py tokens FOLDER OUT --parts 0    # numpy, tokenizers, offline

`build` reads the packages of corpus.toml and writes tokenizer.json, train-NN.jsonl.xz,
held_out.jsonl.xz and corpus.json into FOLDER. A line of a part is a document: {"project": ...,
"text": ...}. A part is a random sample of all projects. A second run writes the same bytes.
`tokens` writes uint16 token ids, little endian, as OUT/train.bin and OUT/held_out.bin, with the
documents in OUT/train.json and OUT/held_out.json.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import lzma
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from corpus_files import (
    DOCUMENT_BYTES,
    Dropped,
    File,
    Package,
    download,
    read_package,
    sha256,
    without_duplicates,
)

TABLE = Path(__file__).with_suffix(".toml")
PROJECT_BYTES = {"train": 200_000_000, "held_out": 4_600_000}  # a sample of a larger project
PART_BYTES = {"train": 55 << 20, "held_out": 6 << 20}  # the largest file of each side
BLOCK_BYTES = 25_000_000  # text that is packed at a time; a part is as many blocks as fit
SAMPLE_BYTES = 50_000_000  # the tokenizer is trained on the first documents of train-00
# Packs 7 MB/s for each core; preset 9 packs 1 MB/s and saves 16 %.
XZ = {"id": lzma.FILTER_LZMA2, "preset": 3, "dict_size": 64 << 20, "nice_len": 64, "depth": 8}
VOCABULARY, END = 16_384, "<|endoftext|>"
SEED = "study corpus 1"  # orders the documents

Document = dict[str, str]  # "project" and "text"
_worker: Any = None  # the tokenizer of a worker process


def cut(documents: Iterable[Document], limit: int) -> list[list[Document]]:
    """Cut documents, in their order, into lists of at most ``limit`` bytes of text."""
    lists: list[list[Document]] = []
    size = limit
    for document in documents:
        length = len(document["text"].encode())
        if size + length > limit:
            lists.append([])
            size = 0
        lists[-1].append(document)
        size += length
    return lists


def shuffled(documents: Iterable[Document]) -> list[Document]:
    """Return documents in a random order that depends on SEED and their text alone."""
    return sorted(documents, key=lambda d: hashlib.sha256((SEED + d["text"]).encode()).digest())


def join(files: Iterable[File], limit: int) -> list[Document]:
    """Join the files of each project into documents, of which at most ``limit`` bytes are kept."""
    documents: list[Document] = []
    for project, group in itertools.groupby(files, key=lambda file: file.project):
        texts = cut(({"text": file.text} for file in group), DOCUMENT_BYTES)
        joined = ("".join(piece["text"] for piece in pieces) for pieces in texts)
        documents += cut(shuffled({"project": project, "text": text} for text in joined), limit)[0]
    return shuffled(documents)


def pack(documents: list[Document]) -> bytes:
    """Return documents as JSON lines, packed by xz."""
    lines = (json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
    return lzma.compress("".join(lines).encode(), lzma.FORMAT_XZ, filters=[XZ])


def write_parts(documents: list[Document], folder: Path, side: str, pool: Any) -> list[Path]:
    """Write the parts of one side.

    Raises:
        SystemExit: The held-out documents do not fit one part.
    """
    paths: list[Path] = []
    size = PART_BYTES[side]
    for packed in pool.imap(pack, cut(documents, BLOCK_BYTES)):
        size += len(packed)
        if size > PART_BYTES[side]:
            name = "held_out" if side == "held_out" else f"train-{len(paths):02}"
            paths.append(folder / f"{name}.jsonl.xz")
            paths[-1].unlink(missing_ok=True)
            size = len(packed)
        with paths[-1].open("ab") as file:  # xz reads several streams as one
            file.write(packed)
    if len(set(paths)) < len(paths):
        raise SystemExit(
            f"held_out.jsonl.xz would have more than {PART_BYTES[side]:,} bytes: lower"
            f" PROJECT_BYTES['held_out'] = {PROJECT_BYTES[side]:,}"
        )
    return paths


def read_part(path: Path) -> Iterator[Document]:
    """Yield the documents of a part."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def train_tokenizer(texts: Iterable[str], path: Path) -> None:
    """Train a byte-level BPE tokenizer and write it as tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def _start_worker(tokenizer: str) -> None:
    """Load the tokenizer once for each process, which uses one thread."""
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    _worker = Tokenizer.from_file(tokenizer)


def _encode(documents: list[Document]) -> list[tuple[str, bytes]]:
    """Return the project of each document and its tokens, of which the last is the end token."""
    end = _worker.token_to_id(END)
    texts = [document["text"] for document in documents]
    ids = [encoding.ids for encoding in _worker.encode_batch_fast(texts, add_special_tokens=False)]
    arrays = (np.array([*row, end], dtype="<u2") for row in ids)
    return [(document["project"], a.tobytes()) for document, a in zip(documents, arrays)]


def tokenise(folder: Path, parts: Iterable[Path], target: Path) -> list[dict[str, Any]]:
    """Write the tokens of parts to ``target``.bin and the list of documents to ``target``.json.

    Returns:
        The project, the first token and the number of tokens of each document.
    """
    documents: list[dict[str, Any]] = []
    first = 0
    batches = (batch for part in parts for batch in cut(read_part(part), 4 * DOCUMENT_BYTES))
    cores = len(os.sched_getaffinity(0))
    worker = (_start_worker, (str(folder / "tokenizer.json"),))
    with (
        multiprocessing.get_context("spawn").Pool(cores, *worker) as pool,
        target.with_suffix(".bin").open("wb") as file,
    ):
        for project, ids in itertools.chain.from_iterable(pool.imap(_encode, batches)):
            documents.append({"project": project, "first": first, "tokens": len(ids) // 2})
            first += len(ids) // 2
            file.write(ids)
    target.with_suffix(".json").write_text(json.dumps(documents))
    return documents


def describe(part: Path, folder: Path, scratch: Path) -> dict[str, Any]:
    """Return digest, bytes, documents and tokens of a part and of each project in it."""
    counts: dict[str, dict[str, int]] = {}
    for document, tokens in zip(read_part(part), tokenise(folder, [part], scratch)):
        size = {"bytes": len(document["text"].encode()), "documents": 1, "tokens": tokens["tokens"]}
        for project in ("total", document["project"]):
            row = counts.setdefault(project, dict.fromkeys(size, 0))
            row.update({key: row[key] + value for key, value in size.items()})
    print(f"{part.name}: {counts['total']}", flush=True)
    return {"sha256": sha256(part), **counts.pop("total"), "projects": counts}


def build(folder: Path, downloads: Path) -> None:
    """Make the corpus; see the head of this file."""
    import tomllib

    folder.mkdir(parents=True, exist_ok=True)
    downloads.mkdir(parents=True, exist_ok=True)
    rows = tomllib.loads(TABLE.read_text())["package"]
    packages = [Package(**row) for row in rows]
    paths = {package: download(package, downloads) for package in packages}
    packages.sort(key=lambda package: -paths[package].stat().st_size)  # the longest work first
    files: list[File] = []
    dropped = Dropped()
    with multiprocessing.get_context("spawn").Pool() as pool:
        jobs = [pool.apply_async(read_package, (package, paths[package])) for package in packages]
        for job in jobs:
            files += job.get()[0]
            dropped += job.get()[1]
        files.sort(key=lambda file: (file.side == "held_out", file.project, file.path, file.text))
        found = {side: sum(file.side == side for file in files) for side in PROJECT_BYTES}
        print(f"files read: {found}", flush=True)
        files, duplicates = without_duplicates(files)
        dropped += duplicates
        parts: list[Path] = []
        for side, limit in sorted(PROJECT_BYTES.items()):
            documents = join((file for file in files if file.side == side), limit)
            if side == "train":
                sample = cut(documents, SAMPLE_BYTES)[0]
                train_tokenizer((d["text"] for d in sample), folder / "tokenizer.json")
            parts += write_parts(documents, folder, side, pool)
    reasons: dict[str, Any] = {}
    for (project, reason, unit), number in sorted(dropped.items()):
        reasons.setdefault(project, {}).setdefault(reason, {})[unit] = number
    content = {
        "packages": rows,
        "versions": {n: importlib.metadata.version(n) for n in ("datasketch", "tokenizers")},
        "dropped": reasons,
        "tokenizer.json": {"sha256": sha256(folder / "tokenizer.json")},
        **{part.name: describe(part, folder, downloads / "tokens") for part in parts},
    }
    (folder / "corpus.json").write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Read the command line and run a command."""
    parser = argparse.ArgumentParser(description="Make the corpus of the study.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="make the corpus, on Debian 12")
    command.add_argument("folder", type=Path)
    command.add_argument("--downloads", type=Path, default=Path("downloads"))
    command = commands.add_parser("tokens", help="turn parts into token ids")
    command.add_argument("folder", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("--parts", type=int, nargs="+", help="train parts (default: all)")
    options = parser.parse_args()
    if options.command == "build":
        build(options.folder, options.downloads)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    shutil.copy(options.folder / "tokenizer.json", options.out)
    names = [f"train-{part:02}.jsonl.xz" for part in options.parts or ()]
    paths = [options.folder / name for name in names] or sorted(options.folder.glob("train-*.xz"))
    for target, parts in (("train", paths), ("held_out", [options.folder / "held_out.jsonl.xz"])):
        start = time.monotonic()
        documents = tokenise(options.folder, parts, options.out / target)
        total = sum(document["tokens"] for document in documents)
        print(f"{target}: {total:,} tokens, {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
