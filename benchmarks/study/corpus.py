"""Make the corpus of the study from Debian packages, and turn it into tokens.

    python benchmarks/study/corpus.py build FOLDER    # Debian 12, datasketch, numpy, tokenizers
    python benchmarks/study/corpus.py tokens FOLDER OUT --parts 0    # numpy, tokenizers, offline

`build` reads the packages of corpus.toml and writes tokenizer.json, train-NN.jsonl.xz,
held_out.jsonl.xz and corpus.json into FOLDER. A line of a part is a document: {"project": ...,
"text": ...}. A part is a random sample of all projects. A second run writes the same bytes.
`tokens` writes uint16 token ids, little endian, as OUT/train.bin and OUT/held_out.bin. A document
ends with the token <|endoftext|>, which no text contains.

Kept: source code and documentation that ships as text, by suffix; HTML is not read. corpus.toml has
the suffixes and patterns.
Dropped, in this order: files that are not UTF-8; code that calls itself generated; files under 100
visible bytes or longer than a document; code with a line above 2000 characters or above 120 on
average; files with fewer than 50 % letters or more than 20 % digits; near-duplicates. The comments
about copyright and licence that begin a file are removed: they would repeat in most documents.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import hashlib
import importlib.metadata
import io
import itertools
import json
import lzma
import multiprocessing
import re
import shutil
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tomllib
import typer

TABLE = Path(__file__).with_suffix(".toml")
DOCUMENT_BYTES = 256 * 1024  # a document, and so a file, is at most this long
DUPLICATE, LEAKED = 0.8, 0.5  # the Jaccard similarity of lines from which on a file is dropped
PROJECT_BYTES = {"held_out": 4_600_000, "train": 200_000_000}  # a sample of a larger project
PART_BYTES = 55 << 20  # the largest file of training text
BLOCK_BYTES = 25_000_000  # text that is packed at a time; a part is as many blocks as fit
TEXTS_AT_ONCE = 64  # documents that are turned into tokens at a time
SAMPLE_BYTES = 50_000_000  # the tokenizer is trained on the first documents of train-00
# Packs 7 MB/s for each core; preset 9 packs 1 MB/s and saves 16 %.
XZ = {"id": lzma.FILTER_LZMA2, "preset": 3, "dict_size": 64 << 20, "nice_len": 64, "depth": 8}
VOCABULARY, END = 16_384, "<|endoftext|>"
SEED = "study corpus 1"  # orders the documents

RULES = tomllib.loads(TABLE.read_text())["rules"]
GENERATED, LICENCE = (re.compile(RULES[name], re.IGNORECASE) for name in ("generated", "licence"))
COMMENT = re.compile(RULES["comment"], re.DOTALL)
LETTERS = bytes(i for i in range(256) if i > 127 or chr(i).isalpha())
VISIBLE = bytes(i for i in range(256) if i > 32)

Package = dict[str, str]  # a row of corpus.toml
Document = dict[str, str]  # "project" and "text"


@dataclasses.dataclass
class File:
    """A file of a project: its text and the LeanMinHash of it, or the reason why it is dropped."""

    project: str
    side: str
    path: str
    text: str
    sketch: Any
    dropped: str = ""


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "no file"


def download(package: Package, folder: Path) -> Path:
    """Return the .deb of a package, from ``folder`` or from the Debian archive.

    Raises:
        SystemExit: It cannot be downloaded, or is not the file that corpus.toml names.
    """
    name, version = package["name"], package["version"]
    path = folder / f"{name}_{version.replace(':', '%3a')}_all.deb"
    if not path.exists():
        subprocess.run(["apt-get", "download", f"{name}={version}"], cwd=folder)
    if (found := sha256(path)) != package["sha256"]:
        raise SystemExit(
            f"{path}: expected sha256 {package['sha256']} for {name}, found {found}; delete the"
            " file and run apt-get update on Debian 12 (bookworm), or put the file there from an"
            " archive of Debian"
        )
    return path


def members(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each file of an archive, and of the archives in it."""
    for member in archive:
        if not member.isfile():
            continue
        stream = archive.extractfile(member)
        assert stream is not None
        if re.search(r"usr/src/.*\.tar(\.\w+)?$", member.name):
            with tarfile.open(fileobj=stream, mode="r|*") as inner:
                yield from members(inner)
        elif member.name.endswith("src.zip"):
            with zipfile.ZipFile(io.BytesIO(stream.read())) as packed:
                yield from ((name, packed.read(name)) for name in packed.namelist())
        elif member.name.endswith(".gz"):
            yield member.name.removesuffix(".gz"), gzip.decompress(stream.read())
        else:
            yield member.name, stream.read()


def without_licence(text: str) -> str:
    """Remove the comments about copyright and licence that begin a file."""
    start, kept = 0, ""
    while match := COMMENT.match(text, start):
        start = match.end()
        kept += "" if LICENCE.search(match[0]) else match[0]
    return (kept + text[start:]).lstrip("\n")


def clean(path: str, data: bytes) -> tuple[str, str]:
    """Return the text of a file, or "" and the reason why it is dropped."""
    suffix = path.rpartition(".")[2].lower()
    if suffix not in RULES["code"] + RULES["prose"]:
        return "", "other suffix"
    try:
        text = data.decode().replace("\r\n", "\n").removeprefix("\ufeff")
    except UnicodeDecodeError:
        return "", "not UTF-8"
    is_code, is_generated = suffix in RULES["code"], GENERATED.search(text, 0, 2000)
    text = without_licence(text)
    raw, lines = text.encode(), text.splitlines()
    visible, letters, digits = (
        len(raw) - len(raw.translate(None, kind)) for kind in (VISIBLE, LETTERS, b"0123456789")
    )
    longest, mean = max(map(len, lines), default=0), len(raw) / max(1, len(lines))
    reasons = {
        "generated": is_code and is_generated,
        "almost empty": visible < 100,
        "longer than a document": len(raw) + len(path.encode()) + 10 > DOCUMENT_BYTES,
        "long lines": is_code and (longest > 2000 or mean > 120),
        "table of numbers": letters < 0.5 * visible or digits > 0.2 * visible,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), "")
    return "" if reason else f"==> {path} <==\n{text.rstrip()}\n", reason


def sketch(text: str) -> Any:
    """Return the MinHash of the distinct lines after the first one, the file's path."""
    from datasketch import LeanMinHash, MinHash

    minhash = MinHash(num_perm=128, hashfunc=zlib.crc32)
    lines = {line.strip() for line in text.encode().splitlines()[1:]}
    minhash.update_batch([line for line in lines if len(line) > 3])
    return LeanMinHash(minhash)


def read_package(package: Package, path: Path) -> list[File]:
    """Return the files of a package, of which some are dropped."""
    wanted, unwanted = package.get("wanted", ""), package.get("unwanted", "$^")
    files: list[File] = []
    command = ["dpkg-deb", "--fsys-tarfile", str(path)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for name, data in members(archive):
            name = name.removeprefix("./")
            if re.search(wanted, name) and not re.search(unwanted, name):
                text, reason = clean(name, data)
                facts = package["project"], package["side"], name, text
                files.append(File(*facts, sketch(text) if text else None, reason))
    return files


def drop_duplicates(files: list[File]) -> None:
    """Drop held-out files that resemble a training file, then near-duplicates of earlier files.

    Args:
        files: Training files come first.
    """
    from datasketch import MinHashLSH

    def similar(index: Any, file: File, threshold: float) -> list[File]:
        candidates = (files[i] for i in index.query(file.sketch))
        return [other for other in candidates if other.sketch.jaccard(file.sketch) >= threshold]

    # An index finds candidates, with a lower threshold.
    held_out, kept = (MinHashLSH(threshold=t - 0.1, num_perm=128) for t in (LEAKED, DUPLICATE))
    for number, file in enumerate(files):
        if file.side == "held_out":
            held_out.insert(number, file.sketch)
    for file in files:
        for leaked in similar(held_out, file, LEAKED) if file.side == "train" else ():
            leaked.dropped = "resembles a training file"
    for number, file in enumerate(files):
        if not file.dropped and similar(kept, file, DUPLICATE):
            file.dropped = "near-duplicate"
        if not file.dropped:
            kept.insert(number, file.sketch)


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
    """Write the parts of one side: held-out text is one part."""
    paths: list[Path] = []
    for packed in pool.imap(pack, cut(documents, BLOCK_BYTES)):
        size = len(packed) + (paths[-1].stat().st_size if paths else 0)
        if not paths or (side == "train" and size > PART_BYTES):
            name = side if side == "held_out" else f"train-{len(paths):02}"
            paths.append(folder / f"{name}.jsonl.xz")
            paths[-1].unlink(missing_ok=True)
        with paths[-1].open("ab") as file:  # xz reads several streams as one
            file.write(packed)
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


def tokenise(part: Path, tokenizer: Path) -> np.ndarray:
    """Return the token ids of a part, uint16 [T]; the last one of a document is that of END."""
    from tokenizers import Tokenizer

    model, pieces = Tokenizer.from_file(str(tokenizer)), []
    end, texts = model.token_to_id(END), [document["text"] for document in read_part(part)]
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        for encoding in model.encode_batch_fast(texts[first : first + TEXTS_AT_ONCE]):
            pieces.append(np.array([*encoding.ids, end], "<u2"))
    ids = np.concatenate(pieces)
    print(f"{part.name}: {len(ids):,} tokens", flush=True)
    return ids


def describe(part: Path) -> dict[str, Any]:
    """Return the digest, documents and tokens of a part."""
    ids = tokenise(part, part.with_name("tokenizer.json"))
    documents = int(np.count_nonzero(ids == ids[-1]))
    return {"sha256": sha256(part), "documents": documents, "tokens": len(ids)}


def build(folder: Path, downloads: Path = Path("downloads")) -> None:
    """Make the corpus, on Debian 12; see the head of this file."""
    for path in (folder, downloads):
        path.mkdir(parents=True, exist_ok=True)
    packages = tomllib.loads(TABLE.read_text())["package"]
    jobs = [(package, download(package, downloads)) for package in packages]
    jobs.sort(key=lambda job: -job[1].stat().st_size)  # the longest work first
    parts: list[Path] = []
    with multiprocessing.get_context("spawn").Pool() as pool:
        files = list(itertools.chain(*pool.starmap(read_package, jobs, chunksize=1)))
        texts = [file for file in files if not file.dropped]
        texts.sort(key=lambda file: (file.side == "held_out", file.project, file.path, file.text))
        drop_duplicates(texts)
        for side, limit in PROJECT_BYTES.items():
            kept = (file for file in texts if file.side == side and not file.dropped)
            documents = join(kept, limit)
            if side == "train":
                sample = cut(documents, SAMPLE_BYTES)[0]
                train_tokenizer((d["text"] for d in sample), folder / "tokenizer.json")
            parts += write_parts(documents, folder, side, pool)
    dropped = collections.Counter((file.project, file.dropped) for file in files if file.dropped)
    content = {
        "versions": {n: importlib.metadata.version(n) for n in ("datasketch", "tokenizers")},
        "dropped files": {", ".join(names): count for names, count in sorted(dropped.items())},
        "tokenizer.json": {"sha256": sha256(folder / "tokenizer.json")},
        **{part.name: describe(part) for part in parts},
    }
    (folder / "corpus.json").write_text(json.dumps(content, indent=1) + "\n")


def tokens(
    folder: Path,
    out: Path,
    parts: Annotated[list[int] | None, typer.Option(help="train parts (default: all)")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="another tokenizer.json")] = None,
) -> None:
    """Turn parts of the corpus into token ids."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(tokenizer or folder / "tokenizer.json", out / "tokenizer.json")
    train = [folder / f"train-{part:02}.jsonl.xz" for part in parts or ()]
    train = train or sorted(folder.glob("train-*.jsonl.xz"))
    for side, paths in (("train", train), ("held_out", [folder / "held_out.jsonl.xz"])):
        with (out / f"{side}.bin").open("wb") as file:
            for path in paths:
                tokenise(path, out / "tokenizer.json").tofile(file)


if __name__ == "__main__":
    app = typer.Typer(help="Make the corpus of the study, and turn it into tokens.")
    app.command()(build)
    app.command()(tokens)
    app()
