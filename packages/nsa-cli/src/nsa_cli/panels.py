"""The panels of help pages: groups of commands, and of the options of long commands.

An option that is in no panel is listed under "Options".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Groups of commands, in this order. A command names its own with rich_help_panel.
USE, PROVE, MEASURE, TRAIN, EXTEND = "Use", "Prove", "Measure", "Train", "Extend"

_SLOTS = ("cmp", "select", "sel", "win", "combine")
_PLOTS = ("png", "svg")

# command -> title of a panel -> names of parameters
OPTION_PANELS: dict[str, dict[str, tuple[str, ...]]] = {
    "verify": {
        "Backends": (*_SLOTS, "every"),
        "Checks": ("preset", "phase", "dtype", "cases", "shard", "seed", "text", "reads"),
        "One check": ("case", "history"),
        "Machine": ("device", "jobs", "job_timeout"),
        "Output": ("verbose", "json_file", "force"),
    },
    "bench": {
        "Backends": ("combo", "rival"),
        "Problem": ("preset", "shape", "length", "phase", "dtype", "blocks", "batch", "page_size"),
        "Inputs": ("inputs", "text", "checkpoint", "seed"),
        "Machine and limits": (
            *("device", "threads", "budget", "max_call", "cell_limit", "time_limit"),
        ),
        "Output": ("json_file", "html", *_PLOTS, "force"),
    },
    "train": {
        "Data": ("data", "tokenizer", "text_field", "held_out", "held_out_rows", "length", "vocab"),
        "Model": ("size", "attention", "backends", "from_dense"),
        "Training": (
            *("steps", "batch", "accumulate", "lr", "warmup", "weight_decay", "clip", "seed"),
            *("eval_every", "save_every", "resume"),
        ),
        "Machine": ("device", "threads", "dtype", "recompute", "compile", "graph"),
        "Several processes": ("parallel", "context_parallel", "tensor_parallel"),
        "Output": ("out", *_PLOTS, "force"),
    },
    "convert": {
        "Model": ("hf", "out", "nsa", "dtype", "backends"),
        "Training of new parameters": ("text", "steps", "length", "batch", "lr", "seed"),
        "Machine": ("device", "threads"),
    },
    "explain": {
        "Backends": _SLOTS,
        "Layer": ("n_heads", "n_kv_heads", "head_dim", "v_head_dim"),
        "Request": (
            *("device", "gpu", "dtype", "batch", "seq_len", "grad", "varlen", "deterministic"),
            *("phase", "page_size"),
        ),
    },
}


def arrange_help(command: str, params: Iterable[Any]) -> None:
    """Set the panel of each option, and no value for flags.

    Args:
        command: Name of the command.
        params: Its click parameters.
    """
    panels = OPTION_PANELS.get(command, {})
    panel_of = {name: panel for panel, names in panels.items() for name in names}
    for param in params:
        if param.param_type_name != "option":
            continue
        param.rich_help_panel = panel_of.get(param.name, param.rich_help_panel)
        if param.is_flag and param.metavar is None:
            param.metavar = ""  # some versions of typer print <bool>
