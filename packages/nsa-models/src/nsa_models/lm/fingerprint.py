"""Fingerprints of corpora, by which a resumed run knows that its text is the same.

A fingerprint has a text for each name, "1,034 bytes with digest 4f1c..." for a file. It is the same
on every machine and for any number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

Fingerprint = dict[str, str]

_CHUNK, _BLOCK = 1 << 26, 1 << 20  # bytes that a thread digests at a time, and reads at a time
_DIGEST = " with digest "


class Documents(Protocol):
    """Documents by number, such as a list or the lines of a file."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> str: ...


def fingerprint_of_files(files: Mapping[str, Path]) -> Fingerprint:
    """Return the fingerprint of files by name. Every byte is read, by several threads.

    A digest is that of the SHA-256 digests of each 64 MiB, so it changes with every byte.
    """
    sizes = {name: path.stat().st_size for name, path in files.items()}
    chunks = [(name, start) for name, size in sizes.items() for start in range(0, size, _CHUNK)]
    digests = {name: hashlib.sha256() for name in files}
    pool = ThreadPoolExecutor()
    try:
        parts = pool.map(lambda chunk: _digest(files[chunk[0]], chunk[1]), chunks)
        for (name, _), part in zip(chunks, parts):
            digests[name].update(part)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, only the chunks at work are completed
    return {name: _entry(sizes[name], digests[name].hexdigest()) for name in files}


def fingerprint_of_texts(name: str, texts: Documents) -> Fingerprint:
    """Return the fingerprint of texts that are not in a file."""
    size, digest = 0, hashlib.sha256()
    for number in range(len(texts)):
        content = texts[number].encode("utf-8", errors="replace")
        size += len(content)
        digest.update(len(content).to_bytes(8, "little") + content)
    return {name: _entry(size, digest.hexdigest())}


def changes(old: Fingerprint, new: Fingerprint) -> list[str]:
    """Return a sentence for each name that differs, such as "a.txt has 12 bytes, had 10 bytes"."""
    sentences = []
    for name in sorted(old.keys() | new.keys()):
        was, now = (content.get(name, "").partition(_DIGEST) for content in (old, new))
        if was == now:
            continue
        if not all((was[0], now[0])):
            sentences.append(f"{name} is {'new' if now[0] else 'missing'}")
        elif was[0] == now[0]:
            sentences.append(f"{name} has other content in its {now[0]}")
        else:
            sentences.append(f"{name} has {now[0]}, had {was[0]}")
    return sentences


def _entry(size: int, digest: str) -> str:
    return f"{size:,} bytes{_DIGEST}{digest[:32]}"


def _digest(path: Path, start: int) -> bytes:
    digest, left = hashlib.sha256(), _CHUNK
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left and (block := file.read(min(left, _BLOCK))):
            digest.update(block)
            left -= len(block)
    return digest.digest()
