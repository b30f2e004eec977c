"""Read the text files of Debian packages and drop near-duplicates: the first steps of corpus.py.

Kept: source code and documentation that ships as text, by suffix (CODE, PROSE); HTML is not read.
Dropped, in this order: files that are not UTF-8 or binary; code that calls itself generated; files
under 100 visible bytes or longer than a document; code with a line above 2000 characters or above
120 on average; files with fewer than 50 % letters or more than 20 % digits. The comments about
copyright and licence that begin a file are removed: they would repeat in most documents.
"""

from __future__ import annotations

import collections
import gzip
import hashlib
import io
import re
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

DOCUMENT_BYTES = 256 * 1024  # a document, and so a file, is at most this long
DUPLICATE, LEAKED = 0.8, 0.5  # the Jaccard similarity of lines from which on a file is dropped
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


@dataclass(frozen=True)
class Package:
    """A row of corpus.toml.

    Attributes:
        project: Packages of one project are on one side.
        side: "train" or "held_out".
        wanted: Regular expression for the paths of the files that are read.
        unwanted: Regular expression for the paths among them that are not.
    """

    name: str
    version: str
    sha256: str
    project: str
    side: str
    wanted: str = ""
    unwanted: str = r"$^"


class File(NamedTuple):
    """A text file of a project; ``sketch`` is a LeanMinHash of datasketch."""

    project: str
    side: str
    path: str
    text: str
    sketch: Any


Dropped = collections.Counter[tuple[str, str, str]]  # project, reason, "files" or "bytes"


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def download(package: Package, folder: Path) -> Path:
    """Return the .deb of a package, from ``folder`` or from the Debian archive.

    Raises:
        SystemExit: It cannot be downloaded, or is not the file that corpus.toml names.
    """
    pattern = f"{package.name}_{package.version.replace(':', '%3a')}_all.deb"
    if not (folder / pattern).exists():
        subprocess.run(["apt-get", "download", f"{package.name}={package.version}"], cwd=folder)
    if not (folder / pattern).exists():
        raise SystemExit(
            f"apt-get has no {package.name}={package.version}: run apt-get update on Debian 12"
            f" (bookworm), or put {pattern} from an archive of Debian into {folder}"
        )
    digest = sha256(folder / pattern)
    if digest != package.sha256:
        raise SystemExit(
            f"{folder / pattern}: expected sha256 {package.sha256} for {package.name}, found"
            f" {digest}; delete the file and download it again"
        )
    return folder / pattern


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
    if "\0" in text:
        return "", "binary"
    if suffix in CODE and GENERATED.search(text, 0, 2000):
        return "", "generated"
    text = without_licence(text)
    raw, lines = text.encode(), text.splitlines()
    visible, letters, digits = (
        len(raw) - len(raw.translate(None, kind)) for kind in (VISIBLE, LETTERS, b"0123456789")
    )
    if visible < 100:
        return "", "almost empty"
    if len(raw) + len(path.encode()) + 10 > DOCUMENT_BYTES:
        return "", "longer than a document"
    if suffix in CODE and (max(map(len, lines)) > 2000 or len(raw) > 120 * len(lines)):
        return "", "long lines"
    if letters < 0.5 * visible or digits > 0.2 * visible:
        return "", "table of numbers"
    return f"==> {path} <==\n{text.rstrip()}\n", ""


_minhash: dict[str, Any] = {}


def sketch(text: str) -> Any:
    """Return the MinHash of the distinct lines after the first one, the file's path."""
    from datasketch import LeanMinHash, MinHash

    if "blank" not in _minhash:
        _minhash["blank"] = MinHash(num_perm=128, hashfunc=zlib.crc32)
    minhash = _minhash["blank"].copy()
    lines = {line.strip() for line in text.encode().splitlines()[1:]}
    minhash.update_batch([line for line in lines if len(line) > 3])
    return LeanMinHash(minhash)


def read_package(package: Package, path: Path) -> tuple[list[File], Dropped]:
    """Return the files of a package that are kept, and counts of the others."""
    files, dropped = [], Dropped()
    command = ["dpkg-deb", "--fsys-tarfile", str(path)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for name, data in members(archive):
            name = name.removeprefix("./")
            if not re.search(package.wanted, name) or re.search(package.unwanted, name):
                continue
            text, reason = clean(name, data)
            if text:
                files.append(File(package.project, package.side, name, text, sketch(text)))
            else:
                dropped[package.project, reason, "files"] += 1
                dropped[package.project, reason, "bytes"] += len(data)
    if process.returncode:
        raise SystemExit(f"dpkg-deb cannot read {path}; delete the file and download it again")
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

    dropped, kept = Dropped(), []
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
            dropped[file.project, reasons[i], "files"] += 1
            dropped[file.project, reasons[i], "bytes"] += len(file.text.encode())
        else:
            index.insert(i, file.sketch)
            kept.append(file)
    return kept, dropped
