"""`nsa bench decode`: its cells and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nsa_cli import output
from nsa_cli.choices import (
    as_options,
    check_page_size,
    dtype_names,
    pairs_of_backends,
    pick_device,
)
from nsa_core.errors import InvalidInput

if TYPE_CHECKING:
    from nsa_bench.settings import DecodeCell, DecodeSettings


def cells(
    shape: str | None, length: str | None, batch: int | None, page_size: int | None
) -> list[DecodeCell]:
    """Return a cell per shape and length; none if neither is given, which selects the defaults.

    Raises:
        InvalidInput: Only a batch or page size is given.
    """
    from nsa_bench.settings import DecodeCell, parse_decode_shape
    from nsa_bench.shapes import parse_lengths

    if shape is None and length is None:
        given = {"batch": batch, "page_size": page_size}
        if unused := [name for name, value in given.items() if value is not None]:
            raise InvalidInput(
                f"{as_options(unused)}: give --shape or --length with it; the default cells of this"
                " device have their own values"
            )
        return []
    shapes = [
        parse_decode_shape(word) for word in ("reports" if shape is None else shape).split(",")
    ]
    return [
        DecodeCell(each_shape, batch or 1, tokens, page_size)
        for each_shape in shapes
        for tokens in parse_lengths("2k..8k" if length is None else length)
    ]


def settings(
    chosen: Sequence[DecodeCell],
    combos: Sequence[str],
    dtype: str | None,
    device: str,
    threads: int,
    values: Mapping[str, Any],
) -> DecodeSettings:
    """Return the settings of a run; ``values`` are further fields of them."""
    from nsa_bench.settings import DecodeSettings, default_cells, layer_config

    for combo in combos:
        pairs_of_backends(combo, "--combo")
    dtypes = None if dtype is None else dtype_names(dtype)
    for cell in chosen or default_cells("cpu"):
        with output.naming("--blocks:"):
            config = layer_config(cell.shape, values["blocks"])
        check_page_size(cell.page_size, config.select_block_size)
    torch_device = pick_device(device, threads)
    from nsa_verify.problems.combination import parse_combination

    default = "bfloat16" if torch_device.startswith("cuda") else "float32"
    return DecodeSettings(
        cells=chosen,
        dtypes=dtypes or [default],
        combos=[parse_combination(word) for word in combos],
        device=torch_device,
        **values,
    )
