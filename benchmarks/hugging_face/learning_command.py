"""The command line and the result file that the scripts of this folder share."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from nsa_bench.environment import machine
from nsa_core.util.atomic_files import write_atomic


def command_line(description: str | None, scales: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser of --device, --scale and --json.

    Args:
        description: Docstring of the script.
        scales: Names of its scales; "full" is the default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    available = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=available, help=f"default: {available}")
    parser.add_argument("--scale", choices=list(scales), default="full", help="default: full")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result file")
    return parser


def result(kind: str, device: str, scale: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a result document: ``fields`` after the machine, the versions and the scale."""
    return {
        "kind": kind,
        "schema_version": 1,
        "machine": machine(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "scale": dataclasses.asdict(scale),
        **fields,
    }


def write(document: dict[str, Any], file: Path | None) -> None:
    """Write a result document, if a file is given."""
    if file is not None:
        write_atomic(file, json.dumps(document, indent=1) + "\n", force=True)
