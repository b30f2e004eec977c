"""Optional libraries of commands: name the missing ones before any work."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

_EXTRA_OF = {
    "safetensors": "train",
    "tokenizers": "train",
    "datasets": "train",
    "pyarrow": "train",
    "transformers": "hf",
    "matplotlib": "plot",
    "jinja2": "plot",
}


def need_extras(command: str, modules: Sequence[str]) -> None:
    """Check that optional libraries are installed; this imports none of them.

    Raises:
        BackendUnavailable: Some are not; the message names all of them and the pip command.
    """
    from nsa_core.errors import BackendUnavailable

    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({_EXTRA_OF[name] for name in missing}, reverse=True))
        names = ", ".join(missing)
        are = "which is" if len(missing) == 1 else "which are"
        raise BackendUnavailable(
            f"{command} needs {names}, {are} not installed:\n  pip install 'nsa-cli[{extras}]'"
        )


TASKS = ("uniform", "recall")  # of nsa_models.lm.task


def libraries_of_data(data: str) -> list[str]:
    """Return the optional libraries that reading ``data`` of `nsa train --data` needs.

    Raises:
        InvalidInput: ``data`` is neither a known name nor a path that exists, or has too few texts.
    """
    from nsa_core.errors import InvalidInput
    from nsa_core.util.text import did_you_mean
    from nsa_models.lm.text_files import check_files

    if data == "fineweb-edu" or (data.startswith("hf:") and data != "hf:"):
        return ["datasets"]
    path, names = Path(data), ("python-docs", "fineweb-edu", *TASKS)
    if data not in names and not (data and path.exists()):
        raise InvalidInput(
            f"--data {data or repr(data)}: no such file or folder{did_you_mean(data, names)}; give"
            f" an existing path, {', '.join(names)} or hf:NAME"
        )
    files = {} if data in names else check_files(path)
    return ["pyarrow"] * any(file.suffix.lower() == ".parquet" for file in files.values())
