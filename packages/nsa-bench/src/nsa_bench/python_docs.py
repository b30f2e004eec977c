"""Text from the Python installation, so that "real" inputs need no download."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path


def library_text(at_least: int) -> bytes:
    """Return Python's own documentation: the language reference, then docstrings of its modules.

    Docstrings are read only if the reference is shorter than ``at_least`` bytes. The result may
    still be shorter, and it differs between versions of Python.
    """
    text = "\n\n".join(_reference()).encode()
    if len(text) < at_least:
        text += "\n\n".join(_docstrings()).encode(errors="replace")
    return text


def library_documents() -> list[str]:
    """Return the same documentation as separate documents: reference topics, then docstrings."""
    return list(dict.fromkeys(_reference() + _docstrings()))


def _reference() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # this Python was installed without its documentation
        return []
    return [topics[name] for name in sorted(topics)]


def _docstrings() -> list[str]:
    docstrings = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings += [
            ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)
        ]
    return list(filter(None, docstrings))
