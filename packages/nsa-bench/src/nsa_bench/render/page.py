"""The HTML report of a benchmark result: one file that works offline.

The file holds its style and its figures, as SVG, and no script; a Content-Security-Policy forbids
every request. Jinja2 escapes all names. jinja2 and matplotlib are imported when a page is made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from nsa_bench.render.format import Rows, number
from nsa_bench.render.page_figures import page_figures
from nsa_bench.render.style import DARK_COLOURS
from nsa_bench.render.summary import MISSING, summary
from nsa_bench.render.tables import tables
from nsa_bench.render.words import headlines, phase_words, problem_words
from nsa_bench.result import Result
from nsa_core.util.extras import require_module


def page(result: Result) -> str:
    """Return the report as one HTML file without external resources.

    Raises:
        BackendUnavailable: A package of the extra "plot" is not installed.
    """
    jinja2 = require_module("jinja2", "reports need", "nsa-cli[plot]")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nsa_bench.render"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    sentences = list(summary(result))
    problems = [line for style, line in sentences if "red" in style]
    verdict = [line for style, line in sentences if "bold" in style and "red" not in style]
    plain = [line for style, line in sentences if not style]
    text: str = environment.get_template("report.html.jinja").render(
        device=result.environment.get("device", "?"),
        facts=_facts(result),
        headlines=list(headlines(result)),
        problems=problems,
        verdict=verdict,
        notes=plain,
        missing=[line for style, line in sentences if style == MISSING],
        tables=[_table(rows) for rows in (*tables(result), *_kernels_without_total(result))],
        folded={"Machine": _lines(result.environment), "Settings": _lines(result.settings)},
        problems_with_figures=list(page_figures(result)),
        dark_colours=DARK_COLOURS,
    )
    return text


def _facts(result: Result) -> list[str]:
    """Return the short facts below the title: dtypes, versions, commit and duration."""
    versions = result.environment.get("versions", {})
    commit = result.environment.get("git_commit") or ""
    return [
        *dict.fromkeys(m.dtype for m in result.measurements),
        *(
            f"{name} {versions[name]}"
            for name in ("nsa-core", "torch", "triton")
            if name in versions
        ),
        *([f"commit {commit[:10]}{'+' * commit.endswith('+')}"] if commit else []),
        f"measured in {result.seconds:.0f} s",
    ]


def _kernels_without_total(result: Result) -> Iterator[Rows]:
    """Yield a table of kernels that were timed while the whole call was not; tables() has none."""
    cells = [
        [
            *(problem_words(m), phase_words(m.phase), str(m.length), m.subject, name),
            number(part.performance.median_ms),
        ]
        for m in result.measurements
        if m.performance is None
        for name, part in m.parts.items()
        if part.performance is not None
    ]
    if cells:
        columns = ["problem", "phase", "tokens", "subject", "kernel", "ms"]
        yield "Kernels alone, of calls that were not timed as a whole", columns, cells


def _table(rows: Rows) -> dict[str, Any]:
    """Return a table for the template; columns of words are aligned left."""
    title, columns, cells = rows
    words = [any(row[i][:1].isalpha() for row in cells) for i in range(len(columns))]
    return {
        "title": title,
        "columns": list(zip(columns, words)),
        "rows": [list(zip(row, words)) for row in cells],
    }


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of each fact; a nested one is written as indented JSON."""
    return [
        (name, value if isinstance(value, str) else json.dumps(value, indent=1))
        for name, value in facts.items()
    ]
