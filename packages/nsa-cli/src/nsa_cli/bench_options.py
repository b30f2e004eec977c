"""The options of `nsa bench`, and what its presets stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PRESETS: dict[str, dict[str, dict[str, str]]] = {
    "quick": {
        "cpu": {
            "shapes": "tiny",
            "lengths": "256..1k",
            "phases": "forward,backward",
            "dtypes": "float32",
        },
        "cuda": {
            "shapes": "reports",
            "lengths": "2k..16k",
            "phases": "forward,backward",
            "dtypes": "bfloat16",
        },
    },
    "full": {
        "cpu": {
            "shapes": "reports",
            "lengths": "512..8k",
            "phases": "forward,backward",
            "dtypes": "float32",
        },
        "cuda": {
            "shapes": "12/2/64,64/4/128,32/8/128",
            "lengths": "2k..64k",
            "phases": "forward,backward",
            "dtypes": "bfloat16",
        },
    },
}
# options that a step of decode has no use for
PREFILL = (
    "rival",
    "inputs",
    "text",
    "checkpoint",
    "max_call",
)
BUDGET_S = {"quick": 0.1, "full": 0.3}
TIME_LIMIT_S = {"quick": 25.0, "full": 420.0}

Json = Annotated[
    Path | None, typer.Option("--json", help="Write the result file.", show_default=False)
]
Html = Annotated[
    Path | None, typer.Option("--html", help="Write a report in one file.", show_default=False)
]
Png = Annotated[
    Path | None, typer.Option("--png", help="Write the plots as PNG.", show_default=False)
]
Svg = Annotated[
    Path | None, typer.Option("--svg", help="Write the plots as SVG.", show_default=False)
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite output files.")]
Combos = Annotated[
    list[str] | None,
    typer.Option(
        "--combo",
        help="win=sdpa,cmp=fa2 or one name; repeatable. Left out: all that are ready.",
        show_default=False,
    ),
]
Rivals = Annotated[
    list[str] | None,
    typer.Option(
        "--rival",
        show_default=False,
        help="Somebody else's NSA to time as well: fla; repeatable. Left out: all known, on a GPU.",
    ),
]
Preset = Annotated[str, typer.Option(help="quick (under a minute) or full.")]
Shapes = Annotated[
    str | None,
    typer.Option(help="Comma-separated Hq/G/Dk[/Dv], reports, paper or tiny.", show_default=False),
]
Lengths = Annotated[str | None, typer.Option(help="512,2k,64k or 2k..64k.", show_default=False)]
Phases = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated: forward, backward, both; or decode, alone.", show_default=False
    ),
]
PageSize = Annotated[
    int | None,
    typer.Option(
        help="Decode: tokens of a page of the cache; left out, none.", min=1, show_default=False
    ),
]
Dtypes = Annotated[str | None, typer.Option(help="Comma-separated.", show_default=False)]
Blocks = Annotated[str, typer.Option(help="l,d,l',n,w.")]
Inputs = Annotated[
    str, typer.Option(help="Comma-separated: random, real (a layer's activations over --text).")
]
Text = Annotated[
    Path | None,
    typer.Option(
        help="Text behind real inputs; by default the documentation inside Python.",
        show_default=False,
    ),
]
Checkpoints = Annotated[
    list[Path] | None,
    typer.Option(
        "--checkpoint",
        show_default=False,
        help="Trained layer behind real inputs (safetensors), one for each shape; repeatable.",
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(help="Seconds per figure; 3 to 20 samples.", min=0.001, show_default=False),
]
MaxCall = Annotated[
    float, typer.Option(help="Skip lengths whose call is expected to take longer (s).")
]
CellLimit = Annotated[
    float, typer.Option(help="Seconds after which a cell measures nothing new.", min=0.001)
]
TimeLimit = Annotated[
    float | None,
    typer.Option(help="Seconds after which nothing new is measured.", min=1, show_default=False),
]
