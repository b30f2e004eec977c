"""The options of `nsa bench` and the values of its presets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from nsa_cli.choices import (
    BACKENDS,
    BLOCKS,
    DTYPE_CHOICES,
    SHAPE,
    advanced,
    complete_pairs,
    completion,
    shown,
    tokens,
)

LENGTHS = "TOKENS,..|FROM..TO"


def _values(shapes: str, lengths: str, dtypes: str) -> dict[str, str]:
    return {"shapes": shapes, "lengths": lengths, "phases": "forward,backward", "dtypes": dtypes}


# All lengths are longer than n * l' = 1024 tokens: up to it, selection does not run.
PRESETS = {
    "quick": {
        "cpu": _values("2/1/32", "1536,2k", "float32"),
        "cuda": _values("reports", "2k..16k", "bfloat16"),
    },
    "full": {
        "cpu": _values("reports", "2k..8k", "float32"),
        "cuda": _values("12/2/64,64/4/128,32/8/128", "2k..64k", "bfloat16"),
    },
}
BUDGET_S = {"quick": 0.1, "full": 0.3}
TIME_LIMIT_S = {"quick": 40.0, "full": 420.0}

Html = Annotated[
    Path | None,
    typer.Option("--html", help="Write a self-contained HTML report.", show_default=False),
]
Png = Annotated[
    Path | None, typer.Option("--png", help="Write the plots as PNG.", show_default=False)
]
Svg = Annotated[
    Path | None, typer.Option("--svg", help="Write the plots as SVG.", show_default=False)
]
Combos = Annotated[
    list[str] | None,
    typer.Option(
        "--combo",
        metavar=BACKENDS,
        help=(
            "Backends to time: one name, or pairs such as win=sdpa,cmp=fa2. Repeatable. Default:"
            " every ready backend."
        ),
        show_default=False,
        autocompletion=complete_pairs,
    ),
]
Rivals = Annotated[
    list[str] | None,
    advanced(
        "--rival",
        show_default=False,
        **shown("fla", "sfnsa", "xunhao", "none"),
        help=(
            "Other NSA library to time as well, or none. Repeatable. Default: on a GPU, all that"
            " are installed."
        ),
    ),
]
Preset = Annotated[
    Literal["quick", "full"],
    typer.Option(
        help="quick (less than a minute) or full: defaults of the options that are not given."
    ),
]
DecodeBatch = Annotated[
    int | None,
    typer.Option(help="Sequences in the cache. Default: 1.", min=1, show_default=False),
]
CacheLengths = Annotated[
    str | None,
    typer.Option(
        metavar=LENGTHS,
        help="Tokens in the cache: a list such as 512,64k,1M or a range such as 2k..64k.",
        show_default=False,
    ),
]
Shapes = Annotated[
    str | None,
    typer.Option(
        metavar=SHAPE,
        help=(
            "Comma-separated shapes, such as 12/2/64, or 64/4/192/128 if values have another"
            " width; or reports, paper, tiny."
        ),
        show_default=False,
        autocompletion=completion("reports", "paper", "tiny"),
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar=LENGTHS,
        help="Sequence lengths in tokens: a list such as 512,64k,1M or a range such as 2k..64k.",
        show_default=False,
    ),
]
Phases = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated phases.",
        show_default=False,
        **shown("forward", "backward", "both"),
    ),
]
PageSize = Annotated[
    int | None,
    advanced(
        help="Tokens per cache page. Default: no pages.",
        metavar="TOKENS",
        parser=tokens(),
        show_default=False,
    ),
]
Dtypes = Annotated[
    str | None,
    typer.Option(help="Comma-separated dtypes.", show_default=False, **DTYPE_CHOICES),
]
Blocks = Annotated[
    str,
    advanced(
        metavar=BLOCKS,
        help=(
            "Block sizes in tokens: compression l and its stride d, selection l'; number of"
            " selected blocks n; window w."
        ),
    ),
]
Inputs = Annotated[
    str,
    advanced(
        help="Comma-separated inputs; real: activations of a layer on --text.",
        **shown("random", "real"),
    ),
]
Text = Annotated[
    Path | None,
    advanced(
        help="Text file for real inputs. Default: the documentation that ships with Python.",
        show_default=False,
    ),
]
Checkpoints = Annotated[
    list[Path] | None,
    advanced(
        "--checkpoint",
        show_default=False,
        help="Trained layer for real inputs (safetensors), one per shape. Repeatable.",
    ),
]
Budget = Annotated[
    float | None,
    advanced(
        help="Seconds to spend on each figure (3 to 20 samples).", min=0.001, show_default=False
    ),
]
AllowMissing = Annotated[
    bool,
    typer.Option(
        "--allow-missing", help="Tolerate figures of the baseline that the new file lacks."
    ),
]
MaxCall = Annotated[
    float,
    advanced(
        help="Seconds per call: longer calls are ended, or skipped if that is expected.", min=0.001
    ),
]
CellLimit = Annotated[
    float,
    advanced(help="Seconds after which a cell starts no new measurement.", min=0.001),
]
TimeLimit = Annotated[
    float | None,
    advanced(
        help="Seconds after which the run ends; it leaves out what is not measured by then.",
        min=1,
        show_default=False,
    ),
]
