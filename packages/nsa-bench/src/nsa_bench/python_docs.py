"""Text that every Python carries, so that "real" inputs need no download and are the same for
everybody.
"""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path


def library_text(at_least: int) -> bytes:
    """The documentation inside Python: its language reference by topic, then its modules'
    docstrings, by name.

    The docstrings are read only where the reference is shorter than ``at_least`` bytes. The result
    may be shorter still, and differs between versions of Python.
    """
    text = "\n\n".join(_reference()).encode()
    return (
        text
        if len(text) >= at_least
        else text + "\n\n".join(_docstrings()).encode(errors="replace")
    )


def library_documents() -> list[str]:
    """The same documentation as separate documents: a topic of the reference, then a docstring,
    each.
    """
    return list(dict.fromkeys(_reference() + _docstrings()))


def _reference() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a Python without its documentation
        return []
    return [topics[name] for name in sorted(topics)]


def _docstrings() -> list[str]:
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found += [
            ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)
        ]
    return list(filter(None, found))
