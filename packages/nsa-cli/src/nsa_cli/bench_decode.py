"""`nsa bench --phase decode`: build its cells and settings, and run it."""

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
    """Return a cell per shape and length; none if neither is given, which selects the defaults."""
    from nsa_bench.decode_settings import parse_decode_shape
    from nsa_bench.decode_workloads import DecodeCell
    from nsa_bench.shapes import parse_lengths

    if shape is None and length is None:
        return []
    shapes = [parse_decode_shape(word) for word in (shape or "reports").split(",")]
    return [
        DecodeCell(each_shape, batch, tokens, page_size)
        for each_shape in shapes
        for tokens in parse_lengths(length or "2k..8k")
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
    """Run the decode benchmark; a limit that is None takes the preset's value."""
    from nsa_bench.decode import DecodeBench
    from nsa_bench.decode_settings import DecodeSettings
    from nsa_verify.problems.combination import parse_combination

    torch_device = pick_device(device, threads)
    dtypes = dtype_names(dtype or ("bfloat16" if torch_device.startswith("cuda") else "float32"))
    defaults = {"budget_s": bench_options.BUDGET_S, "time_limit_s": bench_options.TIME_LIMIT_S}
    seconds: dict[str, Any] = {
        name: limit if limit is not None else defaults[name][preset]
        for name, limit in limits.items()
    }
    settings = DecodeSettings(
        cells=chosen,
        dtypes=dtypes,
        combos=[parse_combination(word) for word in combos],
        blocks=blocks,
        device=torch_device,
        seed=seed,
        cell_limit_s=cell_limit_s,
        **seconds,
    )
    bench = DecodeBench(settings, output.find_backends(), output.environment())
    with output.progress(len(bench.cells())) as advance:
        return bench.run(advance, stop)
