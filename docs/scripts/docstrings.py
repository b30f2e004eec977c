"""A griffe extension: turn the roles and examples of docstrings into Markdown for the API pages.

``:func:`nsa_core.resolve` `` becomes code, and a link if a page documents the object. The name of a
page in docs becomes a link to it. "Example:" becomes "Examples:", the section name that griffe
renders as code.
"""

from __future__ import annotations

import ast
import pathlib
import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|data|attr|mod):`~?([\w.]+)`")
_PAGE = re.compile(r"\bdocs/((?:how-to|reference|explanation|start)/[\w-]+)\.md")
_CORE = pathlib.Path("packages/nsa-core/src/nsa_core/__init__.py")


def _public_modules() -> dict[str, str]:
    """Return the module of each public name of nsa_core, which are imported on first use."""
    for node in ast.parse(_CORE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULE_OF":
            modules: dict[str, str] = ast.literal_eval(node.value)
            return modules
    raise LookupError(f"{_CORE} has no _MODULE_OF")


class Roles(griffe.Extension):
    """Rewrite docstrings when griffe has loaded an object."""

    def __init__(self) -> None:
        self.modules = _public_modules()

    def _full_path(self, name: str, owner: griffe.Object) -> str:
        """Return the full path of an object that a docstring of ``owner`` names."""
        first, _, rest = name.removeprefix("nsa_core.").partition(".")
        if name.startswith("nsa_core.") and first in self.modules:
            module = self.modules[first].replace("cache", "cache.cache")
            return ".".join(filter(None, ("nsa_core", module, first, rest)))
        try:
            return str(owner.resolve(name))
        except griffe.NameResolutionError:
            return name

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is None:
            return

        def link(role: re.Match[str]) -> str:
            path = self._full_path(role[1], obj)
            return f'<autoref identifier="{path}" optional><code>{role[1]}</code></autoref>'

        text = _ROLE.sub(link, obj.docstring.value)
        text = re.sub(r"(?m)(?<=\S)::$", ":", text)
        # API pages are two folders below docs. MkDocs checks the links.
        text = _PAGE.sub(r"[\1](../../\1.md)", text)
        obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", text)
