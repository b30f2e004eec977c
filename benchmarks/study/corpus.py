"""Make the corpus of the study from Debian packages, and turn it into tokens.

    python benchmarks/study/corpus.py build FOLDER    # Debian 12, datasketch, numpy, tokenizers
    python benchmarks/study/corpus.py tokens FOLDER OUT --parts 0    # numpy, tokenizers, offline

`build` reads the packages of corpus.toml and writes tokenizer.json, train-NN.jsonl.xz,
held_out.jsonl.xz and corpus.json into FOLDER. A line of a part is a document: {"project": ...,
"text": ...}. A part is a random sample of all projects. A second run writes the same bytes.
`tokens` writes uint16 token ids, little endian, as OUT/train.bin and OUT/held_out.bin, with the
documents in OUT/train.json and OUT/held_out.json.

Kept: source code and documentation that ships as text, by suffix (CODE, PROSE); HTML is not read.
Dropped, in this order: files that are not UTF-8; code that calls itself generated; files under 100
visible bytes or longer than a document; code with a line above 2000 characters or above 120 on
average; files with fewer than 50 % letters or more than 20 % digits; near-duplicates. The comments
about copyright and licence that begin a file are removed: they would repeat in most documents.
"""

from __future__ import annotations

import argparse
import collections
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
from typing import Any, NamedTuple

import numpy as np

TABLE = Path(__file__).with_suffix(".toml")
DOCUMENT_BYTES = 256 * 1024  # a document, and so a file, is at most this long
DUPLICATE, LEAKED = 0.8, 0.5  # the Jaccard similarity of lines from which on a file is dropped
PROJECT_BYTES = {"held_out": 4_600_000, "train": 200_000_000}  # a sample of a larger project
PART_BYTES = 55 << 20  # the largest file of training text
BLOCK_BYTES = 25_000_000  # text that is packed at a time; a part is as many blocks as fit
BATCH_BYTES = 16_000_000  # text that is turned into tokens at a time
SAMPLE_BYTES = 50_000_000  # the tokenizer is trained on the first documents of train-00
# Packs 7 MB/s for each core; preset 9 packs 1 MB/s and saves 16 %.
XZ = {"id": lzma.FILTER_LZMA2, "preset": 3, "dict_size": 64 << 20, "nice_len": 64, "depth": 8}
VOCABULARY, END = 16_384, "<|endoftext|>"
SEED = "study corpus 1"  # orders the documents

PROSE = {"pod", "rst", "scrbl", "texi", "txt"}
# fmt: off
CODE = {
    "ada", "adb", "ads", "c", "cc", "cpp", "cs", "cxx", "def", "el", "erl", "go", "h", "hh", "hpp",
    "hrl", "inc", "java", "js", "lisp", "m4", "md", "ml", "mli", "mly", "pas", "php", "pl", "pm",
    "pp", "ps1", "py", "rkt", "rs", "s", "sh", "y", "yrl",
}
# fmt: on
GENERATED = re.compile(
    r"do not (edit|modify)|auto-?(matically)?[ -]?generated|@generated"
    r"|(file|code) (is|was) generated|generated (by|from) \S+\.(py|pl|sh|awk|xml)\b"
    r"|machine[ -]generated",
    re.IGNORECASE,
)
LICENCE = re.compile(r"copyright|licen[sc]e|\(c\) \d{4}|public domain", re.IGNORECASE)
COMMENT = re.compile(
    r"\s*(?:<\?php\s*)?(?:/\*.*?\*/|\(\*.*?\*\)|\{(?!\$).*?\}"
    r"|(?:[ \t]*(?://|;|--|%|#(?=[\s!#-])|@c\b|dnl\b)[^\n]*(?:\n|\Z))+)",
    re.DOTALL,
)

LETTERS = bytes(i for i in range(256) if i > 127 or chr(i).isalpha())
VISIBLE = bytes(i for i in range(256) if i > 32)

Package = dict[str, str]  # a row of corpus.toml
Document = dict[str, str]  # "project" and "text"
Dropped = list[tuple[str, str, int]]  # project, reason, bytes


class File(NamedTuple):
    """A text file of a project; ``sketch`` is a LeanMinHash of datasketch."""

    project: str
    side: str
    path: str
    text: str
    sketch: Any


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
    if suffix not in PROSE | CODE:
        return "", "other suffix"
    try:
        text = data.decode().replace("\r\n", "\n").removeprefix("\ufeff")
    except UnicodeDecodeError:
        return "", "not UTF-8"
    is_code, is_generated = suffix in CODE, GENERATED.search(text, 0, 2000)
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


def read_package(package: Package, path: Path) -> tuple[list[File], Dropped]:
    """Return the files of a package that are kept, and the others."""
    project, side = package["project"], package["side"]
    wanted, unwanted = package.get("wanted", ""), package.get("unwanted", "$^")
    files: list[File] = []
    dropped: Dropped = []
    command = ["dpkg-deb", "--fsys-tarfile", str(path)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for name, data in members(archive):
            name = name.removeprefix("./")
            if not re.search(wanted, name) or re.search(unwanted, name):
                continue
            text, reason = clean(name, data)
            if text:
                files.append(File(project, side, name, text, sketch(text)))
            else:
                dropped.append((project, reason, len(data)))
    return files, dropped


def without_duplicates(files: list[File]) -> tuple[list[File], Dropped]:
    """Drop held-out files that resemble a training file, then near-duplicates of earlier files.

    Args:
        files: Training files come first.
    """
    from datasketch import MinHashLSH

    def similar(index: Any, file: File, threshold: float) -> list[int]:
        candidates = index.query(file.sketch)
        return [i for i in candidates if files[i].sketch.jaccard(file.sketch) >= threshold]

    dropped, kept = [], []
    reasons: dict[int, str] = {}
    held_out = MinHashLSH(threshold=LEAKED - 0.1, num_perm=128)  # finds candidates
    for i, file in enumerate(files):
        if file.side == "held_out":
            held_out.insert(i, file.sketch)
    for file in files:
        if file.side == "train":
            leaked = similar(held_out, file, LEAKED)
            reasons |= dict.fromkeys(leaked, "resembles a training file")
    index = MinHashLSH(threshold=DUPLICATE - 0.1, num_perm=128)
    for i, file in enumerate(files):
        if i not in reasons and similar(index, file, DUPLICATE):
            reasons[i] = "near-duplicate"
        if i in reasons:
            dropped.append((file.project, reasons[i], len(file.text.encode())))
        else:
            index.insert(i, file.sketch)
            kept.append(file)
    return kept, dropped


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


def tokenise(folder: Path, parts: Iterable[Path], target: Path) -> list[dict[str, Any]]:
    """Write the tokens of parts to ``target``.bin and the list of documents to ``target``.json.

    Returns:
        The project, the first token and the number of tokens of each document, with an end token.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end, first = tokenizer.token_to_id(END), 0
    documents: list[dict[str, Any]] = []
    with target.with_suffix(".bin").open("wb") as file:
        for batch in (b for part in parts for b in cut(read_part(part), BATCH_BYTES)):
            encoded = tokenizer.encode_batch_fast([document["text"] for document in batch])
            for document, encoding in zip(batch, encoded):
                ids = np.array([*encoding.ids, end], dtype="<u2")
                row = {"project": document["project"], "first": first, "tokens": len(ids)}
                documents.append(row)
                first += len(ids)
                file.write(ids.tobytes())
    target.with_suffix(".json").write_text(json.dumps(documents))
    return documents


def describe(part: Path, folder: Path, scratch: Path) -> dict[str, Any]:
    """Return digest, documents and tokens of a part, and the tokens of each project in it."""
    documents = tokenise(folder, [part], scratch)
    tokens: collections.Counter[str] = collections.Counter()
    for document in documents:
        tokens[document["project"]] += document["tokens"]
    total = {"documents": len(documents), "tokens": sum(tokens.values())}
    print(f"{part.name}: {total}", flush=True)
    return {"sha256": sha256(part), **total, "projects": tokens}


def build(folder: Path, downloads: Path) -> None:
    """Make the corpus; see the head of this file."""
    import tomllib

    folder.mkdir(parents=True, exist_ok=True)
    downloads.mkdir(parents=True, exist_ok=True)
    packages = tomllib.loads(TABLE.read_text())["package"]
    jobs = [(package, download(package, downloads)) for package in packages]
    jobs.sort(key=lambda job: -job[1].stat().st_size)  # the longest work first
    parts: list[Path] = []
    with multiprocessing.get_context("spawn").Pool() as pool:
        read = pool.starmap(read_package, jobs, chunksize=1)
        files = [file for kept, _ in read for file in kept]
        files.sort(key=lambda file: (file.side == "held_out", file.project, file.path, file.text))
        files, duplicates = without_duplicates(files)
        for side, limit in PROJECT_BYTES.items():
            documents = join((file for file in files if file.side == side), limit)
            if side == "train":
                sample = cut(documents, SAMPLE_BYTES)[0]
                train_tokenizer((d["text"] for d in sample), folder / "tokenizer.json")
            parts += write_parts(documents, folder, side, pool)
    reasons: dict[str, Any] = collections.defaultdict(dict)
    for project, reason, size in sorted(itertools.chain(duplicates, *(drop for _, drop in read))):
        counts = reasons[project].setdefault(reason, collections.Counter())
        counts.update(bytes=size, files=1)
    content = {
        "packages": packages,
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
        documents = tokenise(options.folder, parts, options.out / target)
        print(f"{target}: {sum(row['tokens'] for row in documents):,} tokens", flush=True)


if __name__ == "__main__":
    main()
