"""`nsa backends new`: write a working plugin package from the templates of this package."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from string import Template

from nsa_core.contract import API_VERSION
from nsa_core.errors import InvalidInput
from nsa_core.plan.loading import FIRST_PARTY, installed, normalized
from nsa_core.util.atomic_files import check_output_folder, writing

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_MAX_LENGTH = 40
_SUFFIX = ".tmpl"
_TEMPLATE_FOLDER = Path(__file__).parent / "template"


def rendered(name: str) -> dict[str, str]:
    """Return the files of a plugin package for a backend called ``name``.

    Returns:
        The text of each file by its path in the package's directory.

    Raises:
        InvalidInput: The name is not valid, or an installed backend uses it.
    """
    _check_name(name)
    package = f"nsa_backend_{name.replace('-', '_')}"
    variables = {
        "name": name,
        "package": package,
        "distribution": f"nsa-backend-{name}",
        "api_version": repr(API_VERSION),
    }
    texts = {}
    for path, template in _templates():
        texts[path.replace("src/package/", f"src/{package}/")] = Template(template).substitute(
            variables
        )
    return texts


def create(name: str, folder: Path) -> list[Path]:
    """Write the plugin package of a backend called ``name`` into ``folder``.

    Existing files are never overwritten. If a file cannot be written, none is.

    Args:
        name: Name of the backend: lower-case words joined by "-".
        folder: A directory that is empty, or a new one in a directory that exists.

    Returns:
        The paths of the written files.

    Raises:
        InvalidInput: The name is not valid or is in use, the folder holds something, or no file
            can be created in it.
        NotWritten: A file cannot be written, because the disk is full or broken.
    """
    texts = rendered(name)
    check_output_folder(folder)
    existing = folder if folder.is_dir() else folder.absolute().parent
    # The files are written beside the folder first, so that a full disk leaves nothing.
    with (
        writing(folder),
        tempfile.TemporaryDirectory(prefix=".nsa-", dir=existing) as temporary,
    ):
        home = Path(temporary) / folder.absolute().relative_to(existing)
        for path, text in texts.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text, encoding="utf-8", newline="\n")
        for entry in Path(temporary).iterdir():
            entry.rename(existing / entry.name)
    return [folder / path for path in texts]


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > _MAX_LENGTH or name == "auto":
        rule = (
            "words of lower-case letters and digits joined by '-', which begin with a letter, at"
            f" most {_MAX_LENGTH} characters, and not 'auto'"
        )
        raise InvalidInput(f"{name!r} cannot be a backend's name; it must be {rule}")
    owners = {normalized(plugin.name): plugin.distribution for plugin in installed()}
    owners |= {normalized(plugin.distribution): plugin.distribution for plugin in installed()}
    owners |= {
        distribution.removeprefix("nsa-backend-"): distribution for distribution in FIRST_PARTY
    }
    owner = owners.get(name) or owners.get(f"nsa-backend-{name}")
    if owner is not None:
        raise InvalidInput(f"the name {name!r} is taken by {owner}; choose another")


def _templates() -> Iterator[tuple[str, str]]:
    for file in sorted(_TEMPLATE_FOLDER.rglob(f"*{_SUFFIX}")):
        yield (
            file.relative_to(_TEMPLATE_FOLDER).as_posix().removesuffix(_SUFFIX),
            file.read_text(encoding="utf-8"),
        )
