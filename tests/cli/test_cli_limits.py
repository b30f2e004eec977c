"""Integers beyond reason on a command line end the command with exit code 2, at once."""

import re
import shlex
import time
from typing import Any

import pytest
import typer

from nsa_cli.app import app
from nsa_cli.output import UsageError
from nsa_core.limits import largest

HUGE = str(10**400)
LIMIT_S = 0.05
REQUIRED = {
    "inspect": ("--text", "x", "--out", "x"),
    "generate": ("--checkpoint", "x"),
    "convert": ("--checkpoint", "x", "--out", "x"),
    "train": ("--out", "x"),
}


def _options(command: Any, path: tuple[str, ...] = ()) -> list[Any]:
    """Every option of ``command`` and its commands that takes an integer."""
    children = getattr(command, "commands", {})
    found = [rows for name, child in children.items() for rows in _options(child, (*path, name))]
    for param in command.params:
        kind = getattr(param, "type_descriptor", None) or getattr(param, "type", None)
        if re.search("<class 'int'>|IntRange|INT", repr(kind)):  # versions of typer differ
            identity = f"{'-'.join(path)}{param.opts[0]}"
            found.append(pytest.param(command, path, param.opts[0], param.name, id=identity))
    return found


OPTIONS = _options(typer.main.get_command(app))


def test_options_are_found() -> None:
    assert len(OPTIONS) > 30


@pytest.mark.parametrize(("command", "path", "option", "name"), OPTIONS)
def test_an_option_refuses_a_number_beyond_its_limit(
    command: Any, path: tuple[str, ...], option: str, name: str
) -> None:
    seconds = []
    for value in (str(largest(name) + 1), HUGE, HUGE):
        start = time.perf_counter()
        refusal = f"^{option} must be <= {largest(name)}, got|is not a number of tokens from"
        with pytest.raises(UsageError, match=refusal):
            command.make_context("nsa", [option, value, *REQUIRED.get(path[0], ())])
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < LIMIT_S


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("backends explain --n-heads 5000", "--n-heads must be <= 4096, got 5000"),
        (f"train --out x --vocab {2**24 + 1}", "--vocab must be <= 16777216, got 16777217"),
        (f"train --out x --seed -{2**63}", "--seed must be >= -9223372036854775807, got -92233"),
        (f"bench --threads {HUGE}", "--threads must be <= 4096, got about 1e400"),
        ("bench --shape 5000/5000/64", "n_heads must be <= 4096, got 5000"),
        (f"bench --shape 4/2/{HUGE}", "--shape must be"),
        (f"bench --shape 4/2/{2**20 + 1}", "head_dim must be <= 1048576, got 1048577"),
        (f"bench --shape tiny --blocks 32,16,64,16,{2**31}", "window_size must be <= 2147483647"),
        (f"bench --shape tiny --blocks 32,16,64,{HUGE},512", "got about 1e400"),
        (f"verify --sel sdpa --shard 1/{HUGE}", "--shard"),
        (f"verify --win sdpa --case 'win w={HUGE} tokens=5'", "w must be"),
        (f"verify --win sdpa --case 'win seed={2**63} tokens=5'", "seed must be"),
        (
            "verify --win sdpa --case 'cache step=1000000000'",
            "step must be integers of 0 to 1048576",
        ),
        (f"verify --win sdpa --case 'cache batch={HUGE}'", "batch must be an integer from 1"),
    ],
)
def test_a_command_ends_with_code_2_and_names_the_number(
    nsa: Any, arguments: str, words: str
) -> None:
    result = nsa(*shlex.split(arguments))
    assert result.code == 2, result
    assert words in " ".join(result.err.split()), result.err
