"""The cells and settings of `nsa bench --phase decode`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nsa_cli import bench_options, output
from nsa_cli.choices import dtype_names, pick_device
from nsa_core.util.interruption import Interruption

if TYPE_CHECKING:
    from nsa_bench.decode_workloads import DecodeCell
    from nsa_bench.result import Result


def cells(
    shape: str | None, length: str | None, batch: int, page_size: int | None
) -> list[DecodeCell]:
    """Every shape at every length; none where neither is named, for the device's own."""
    from nsa_bench.decode import shape_named
    from nsa_bench.decode_workloads import DecodeCell
    from nsa_bench.shapes import parse_lengths

    if shape is None and length is None:
        return []
    shapes = [shape_named(word) for word in (shape or "reports").split(",")]
    return [
        DecodeCell(one, batch, n, page_size)
        for one in shapes
        for n in parse_lengths(length or "512,1024,2048")
    ]


def run(
    chosen: Sequence[DecodeCell],
    combos: Sequence[str],
    dtype: str | None,
    blocks: tuple[int, ...],
    device: str,
    threads: int,
    seed: int,
    limits: Mapping[str, float | None],
    preset: str,
    cell_limit_s: float,
    stop: Interruption,
) -> Result:
    """Measure; limits left out are the preset's."""
    from nsa_bench.decode import DecodeBench, DecodeSettings
    from nsa_verify.combination import parse_combination

    place = pick_device(device, threads)
    dtypes = dtype_names(dtype or ("bfloat16" if place.startswith("cuda") else "float32"))
    defaults = {"budget_s": bench_options.BUDGET_S, "time_limit_s": bench_options.TIME_LIMIT_S}
    numbers: dict[str, Any] = {
        name: given if given is not None else defaults[name][preset]
        for name, given in limits.items()
    }
    settings = DecodeSettings(
        cells=chosen,
        dtypes=dtypes,
        combos=[parse_combination(word) for word in combos],
        blocks=blocks,
        device=place,
        seed=seed,
        cell_limit_s=cell_limit_s,
        **numbers,
    )
    bench = DecodeBench(settings, output.find_backends(), output.environment())
    with output.progress(len(bench.cells())) as advance:
        return bench.run(advance, stop)
