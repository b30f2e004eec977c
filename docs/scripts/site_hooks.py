"""MkDocs hooks: links to files outside docs, numbers in tables, and faults that become warnings.

`mkdocs build --strict` fails at a warning. The site must work without any other server, so no page
may load a script, a style sheet, a font or an image from one.
"""

from __future__ import annotations

import logging
import pathlib
import posixpath
import re
from html.parser import HTMLParser
from typing import Any

_log = logging.getLogger("mkdocs.hooks.nsa")
_LINK = re.compile(r"(\]\()((?:\.\./)+[^)\s#]+)((?:#[^)\s]*)?\))")
# Elements that make a browser load a file, and the attribute with its address.
_LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
_LOADED_LINKS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "manifest"}
_IN_STYLE = re.compile(r"(?i)(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)")
_CODE = re.compile(r"(?s)<(pre|code)\b.*?</\1>")
_UNRENDERED = re.compile(r":(?:func|class|meth|data|attr|mod):|<p>(?:Example|Shapes|Notes?):\n")
_NUMBER = re.compile(r"<td>(?=[-+]?\d[^<]{0,24}</td>)")  # in a table, such as -0.030 ± 0.045
_WORDS = re.compile(r"<td>(?=[^<]{25})")
# Markdown takes the asterisks of a formula such as i*d .. i*d for emphasis.
_FORMULA = re.compile(r"<em>([^<]*(?:\.\.|[+^/=])[^<]*|\w)</em>")


class _Loaded(HTMLParser):
    """Collect the addresses of the files that a browser loads for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "link" and _LOADED_LINKS & set(values.get("rel", "").split()):
            self.addresses.append(values.get("href", ""))
        if address := values.get(_LOADING.get(tag, ""), ""):
            self.addresses.append(address)


def external_files(html: str) -> list[str]:
    """Return the addresses on other servers that a browser loads for a page or a style sheet."""
    loaded = _Loaded()
    loaded.feed(html)
    external = [each for each in loaded.addresses if re.match(r"(?i)(https?:)?//", each)]
    return external + _IN_STYLE.findall(html)


def unrendered_docstrings(html: str) -> list[str]:
    """Return roles and section names of docstrings that a page shows as text."""
    return _UNRENDERED.findall(_CODE.sub("", html))


def broken_formulas(html: str) -> list[str]:
    """Return formulas whose asterisks became emphasis."""
    return _FORMULA.findall(_CODE.sub("", html))


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace relative links that leave docs/ by links to the repository."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def outside(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if path.startswith("docs/"):
            return link[0]
        return f"{link[1]}{config.repo_url}/blob/main/{path}{link[3]}"

    return _LINK.sub(outside, markdown)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Mark the cells of tables; warn of files from other servers and of faulty docstrings."""
    for address in external_files(output):
        _log.warning("%s loads %s from another server", page.file.src_uri, address)
    for text in unrendered_docstrings(output):
        _log.warning("%s shows %r: a docstring is not rendered", page.file.src_uri, text)
    for text in broken_formulas(output):
        _log.warning("%s has emphasis in a formula, %r: use code", page.file.src_uri, text)
    return _WORDS.sub('<td class="words">', _NUMBER.sub('<td class="number">', output))


def on_post_build(*, config: Any, **_: Any) -> None:
    """Warn of style sheets that load files from other servers."""
    for sheet in sorted(pathlib.Path(config.site_dir).rglob("*.css")):
        for address in external_files(sheet.read_text(encoding="utf-8")):
            _log.warning("%s loads %s from another server", sheet.name, address)
