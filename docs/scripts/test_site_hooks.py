"""site_hooks.py turns faults of the built site into warnings, and rewrites links."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import site_hooks


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://example.com/a.js"></script>',
        '<link rel="stylesheet" href="//example.com/a.css">',
        '<link rel="preconnect" href="https://fonts.gstatic.com" crossorigin>',
        "<img alt='x' src='http://example.com/a.png'>",
        "<style>@import 'https://example.com/a.css';</style>",
        "<style>a { background: url(https://example.com/a.png) }</style>",
    ],
)
def test_a_file_of_another_server_is_detected(html: str) -> None:
    assert site_hooks.external_files(f"<p>text {html} <a href='https://example.com'>link</a>")


def test_a_link_to_another_server_is_allowed() -> None:
    html = '<a href="https://example.com">x</a><script src="../a.js"></script>'
    assert site_hooks.external_files(html + '<link rel="canonical" href="https://e.com/">') == []


def test_docstrings_that_are_not_rendered_are_detected() -> None:
    assert site_hooks.unrendered_docstrings(
        "<p>see :func:<code>x</code></p><p>Example:\n>>> f()</p>"
    )
    assert not site_hooks.unrendered_docstrings("<code>:func:`x`</code><p>An example: f</p>")


def test_asterisks_of_a_formula_that_became_emphasis_are_detected() -> None:
    assert site_hooks.broken_formulas("<p>tokens i<em>d .. i</em>d</p>") == ["d .. i"]
    assert site_hooks.broken_formulas("lim<em>u</em>2") == ["u"]
    assert not site_hooks.broken_formulas("<p>what it <em>reads</em></p><code><em>u</em></code>")


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](../../README.md#b)", "[a](URL/blob/main/README.md#b)"),
        ("[a](../start/install.md)", "[a](../start/install.md)"),
        ("[a](https://example.com)", "[a](https://example.com)"),
    ],
)
def test_links_that_leave_the_site_lead_to_the_repository(link, expected) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/a.md"))
    config = SimpleNamespace(repo_url="URL")
    assert site_hooks.on_page_markdown(link, page=page, config=config) == expected


def test_numbers_of_a_table_do_not_break_and_words_have_room() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
    html = site_hooks.on_post_page(
        "<td>-0.26 ± 0.88</td><td>all 3</td><td>-</td><td>3 <b>x</b></td>"
        "<td>width of a head, and so on</td>",
        page=page,
    )
    number = '<td class="number">-0.26 ± 0.88</td>'
    words = '<td class="words">width of a head, and so on</td>'
    assert html == f"{number}<td>all 3</td><td>-</td><td>3 <b>x</b></td>{words}"
