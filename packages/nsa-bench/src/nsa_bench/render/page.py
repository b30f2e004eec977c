"""The HTML page of a benchmark result: one file without scripts or external resources."""

from __future__ import annotations

import base64
import html
import json
from typing import TYPE_CHECKING

from nsa_bench.render.plots import render
from nsa_bench.render.summary import MISSING, summary
from nsa_bench.render.tables import tables

if TYPE_CHECKING:
    from nsa_bench.render.format import Rows
    from nsa_bench.result import Result

_STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1400px;padding:0 1em}
body{color:#1a1a1a}table{border-collapse:collapse;margin:0 0 2em;font-size:13px}
td,th{padding:3px 9px;text-align:right;border-bottom:1px solid #ddd}
td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}
caption{text-align:left;font-weight:600;padding:6px 0}img{max-width:100%}.scroll{overflow-x:auto}
pre{overflow-x:auto;background:#f6f6f6;padding:1em}"""


def page(result: Result) -> str:
    """Return the report as one HTML file without scripts or external resources."""
    picture = base64.b64encode(render(result, "png")).decode()
    sentences = list(summary(result))
    lines = "".join(
        f"<li>{html.escape(line)}</li>" for style, line in sentences if style != MISSING
    )
    missing = "".join(
        f"<li>{html.escape(line)}</li>" for style, line in sentences if style == MISSING
    )
    body = "".join(_html_table(rows) for rows in tables(result))
    facts = {"environment": result.environment, "settings": result.settings}
    missing_section = f"<h2>Figures that are missing</h2><ul>{missing}</ul>" if missing else ""
    head = f'<meta charset="utf-8"><title>nsa bench</title><style>{_STYLE}</style>'
    image = f'<img alt="Plots of the tables below" src="data:image/png;base64,{picture}">'
    settings = f"<pre>{html.escape(json.dumps(facts, indent=1))}</pre>"
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body><h1>nsa'
        f" bench</h1><ul>{lines}</ul>{image}{body}{missing_section}<h2>Machine and"
        f" settings</h2>{settings}</body></html>\n"
    )


def _html_table(rows: Rows) -> str:
    title, columns, cells = rows
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cell) + "</tr>" for cell in cells
    )
    inner = f"<caption>{html.escape(title)}</caption><thead><tr>{head}</tr></thead>"
    return f'<div class="scroll"><table>{inner}<tbody>{body}</tbody></table></div>'
