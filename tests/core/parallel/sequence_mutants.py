"""Faults of mode sequence, planted by a change of its sources in this process."""

from __future__ import annotations

import contextlib
import importlib
import pathlib
from collections.abc import Iterator, Mapping

# name -> (module of nsa_core.parallel, old text -> new text)
MUTANTS: dict[str, tuple[str, dict[str, str]]] = {
    "halo of w - 2 rows": ("sequence", {"config.window_size - 1": "config.window_size - 2"}),
    "ownership by the first token": (
        "compressed_rows",
        {"(tokens - size)": "(tokens - 1)", " * stride + size - 1": " * stride"},
    ),
    "capacity rounded down": (
        "compressed_rows",
        {"-(-ranks.chunk // geometry.compress_stride)": "ranks.chunk // geometry.compress_stride"},
    ),
    "the second piece's dk and dv are missing": (
        "exchange_rows",
        {"    for grad in grads[1:]:\n": "    for grad in grads[1:1]:\n"},
    ),
    "mean for sum": (
        "exchange_rows",
        {"ranks.group).to(": "ranks.group).div(ranks.world).to("},
    ),
    "halo rows are not sent back": (
        "exchange_rows",
        {"        win = torch.stack([": "        win = 0 * torch.stack(["},
    ),
    "rotary by the row of the rank": (
        "context",
        {"(cu_seqlens, end - first, first)": "(cu_seqlens, end - first)"},
    ),
    "select of the second piece reads from row 0": (
        "sequence",
        {
            "plan.select(q, k, lse, **packing.of_slots, first_query=first)": (
                "plan.select(q, k, lse, **packing.of_slots, first_query=0)"
            )
        },
    ),
}


_MODULES = (
    "halo",
    "exchange_rows",
    "compressed_rows",
    "sequence",
    "context",
)


def _load(changes: Mapping[str, str], module_name: str) -> None:
    """Execute the modules of the sequence mode again, one of them changed."""
    for name in _MODULES:
        module = importlib.import_module(f"nsa_core.parallel.{name}")
        source = pathlib.Path(str(module.__file__)).read_text(encoding="utf-8")
        for old, new in changes.items() if name == module_name else ():
            assert source.count(old) == 1, (name, old, source.count(old))
            source = source.replace(old, new)
        exec(compile(source, str(module.__file__), "exec"), module.__dict__)


@contextlib.contextmanager
def mutated(module_name: str, changes: Mapping[str, str]) -> Iterator[None]:
    """Change the source of a module of mode sequence in this process; "" changes none."""
    try:
        _load(changes, module_name)
        yield
    finally:
        _load({}, module_name)
