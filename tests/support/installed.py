"""Distributions with a plugin of group ``nsa.backends``, installed in a folder."""

from __future__ import annotations

import pathlib
import textwrap


def install(
    folder: pathlib.Path,
    distribution: str,
    source: str,
    *,
    point: str | None = None,
    version: str = "1.0",
) -> None:
    """Write the only module of a distribution, and its metadata.

    Args:
        folder: The directory of installed packages.
        distribution: The name of the distribution; with ``_`` for ``-``, that of the module.
        source: The text of the module.
        point: The name of the entry point; by default that of the distribution.
        version: The version of the distribution.
    """
    module = distribution.replace("-", "_")
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir()
    (folder / f"{module}.py").write_text(textwrap.dedent(source), encoding="utf-8")
    names = f"Name: {distribution}\nVersion: {version}\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\n{names}")
    (info / "entry_points.txt").write_text(f"[nsa.backends]\n{point or distribution} = {module}\n")
