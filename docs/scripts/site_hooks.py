"""MkDocs hooks: links from a page to a file of the repository outside docs lead to the host."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(\]\()((?:\.\./)+[^)\s#]+)((?:#[^)\s]*)?\))")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace relative links that leave docs/ by links to the repository."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def outside(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if path.startswith("docs/"):
            return link[0]
        return f"{link[1]}{config.repo_url}/blob/main/{path}{link[3]}"

    return _LINK.sub(outside, markdown)
