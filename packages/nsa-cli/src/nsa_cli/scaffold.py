"""`nsa backends new`: a working plugin package, written from the templates this package carries."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from string import Template

from nsa_core.contract import API_VERSION
from nsa_core.dispatch.loading import FIRST_PARTY, installed, normalized
from nsa_core.errors import InvalidInput

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST = 40
_SUFFIX = ".tmpl"
_HOME = Path(__file__).parent / "template"


def rendered(name: str) -> dict[str, str]:
    """Path below the new package's directory -> text, for a backend called ``name``.

    Raises:
        InvalidInput: the name cannot be used, or is taken by an installed backend.
    """
    _check(name)
    package = f"nsa_backend_{name.replace('-', '_')}"
    words = {
        "name": name,
        "package": package,
        "distribution": f"nsa-backend-{name}",
        "api_version": repr(API_VERSION),
    }
    texts = {}
    for path, template in _templates():
        texts[path.replace("src/package/", f"src/{package}/")] = Template(template).substitute(
            words
        )
    return texts


def create(name: str, folder: Path) -> list[Path]:
    """Write the package of a backend called ``name`` into ``folder``, which must be empty or not
    exist.

    Returns the files written. Nothing is overwritten, and nothing stays behind when the system
    refuses.

    Raises:
        InvalidInput: the name cannot be used, the folder is not empty, or the system refuses to
            write there.
    """
    texts = rendered(name)
    written: list[Path] = []
    made: list[Path] = []
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            found = "not empty" if folder.is_dir() else "not a directory"
            raise InvalidInput(f"{folder} exists and is {found}; give a new directory")
        for path, text in texts.items():
            target = folder / path
            made += _make(target.parent)
            with open(target, "x", encoding="utf-8", newline="\n") as file:
                written.append(target)
                file.write(text)
    except OSError as error:
        with contextlib.suppress(OSError):
            for target in written:
                target.unlink()
            for directory in reversed(made):
                directory.rmdir()
        raise InvalidInput(f"{folder} cannot be written to: {error.strerror or error}") from error
    return written


def _check(name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST or name == "auto":
        rule = (
            f"lower-case letters and digits in words joined by '-', at most {_LONGEST} characters,"
            " and not 'auto'"
        )
        raise InvalidInput(f"{name!r} cannot be a backend's name; it must be {rule}")
    taken = {normalized(p.name): p.distribution for p in installed()}
    taken |= {normalized(p.distribution): p.distribution for p in installed()}
    taken |= {n.removeprefix("nsa-backend-"): n for n in FIRST_PARTY}
    owner = taken.get(name) or taken.get(f"nsa-backend-{name}")
    if owner is not None:
        raise InvalidInput(f"the name {name!r} is taken by {owner}; choose another")


def _make(folder: Path) -> list[Path]:
    """Create ``folder`` with what it lies in; those that were not there, outermost first."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()][::-1]
    for place in missing:
        place.mkdir()
    return missing


def _templates() -> Iterator[tuple[str, str]]:
    for file in sorted(_HOME.rglob(f"*{_SUFFIX}")):
        yield (
            file.relative_to(_HOME).as_posix().removesuffix(_SUFFIX),
            file.read_text(encoding="utf-8"),
        )
